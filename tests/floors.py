"""Prints the lowest version that pyproject.toml admits of every direct dependency, as constraints
for pip: what `make test-versions` installs at the lower end."""

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def floors() -> dict[str, str]:
    """The lowest admitted version by package, of the required and of every optional group."""
    groups = PROJECT["optional-dependencies"]
    required = PROJECT["dependencies"] + [each for group in groups.values() for each in group]
    parts = (re.fullmatch(r"([\w-]+)(?:\[.*\])?>=([\w.]+)", each) for each in required)
    return {part[1]: part[2] for part in parts if part}


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in floors().items()))
