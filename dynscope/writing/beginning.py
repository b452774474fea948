"""Whether a run may begin at a path, and what goes on there of the one that is resumed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynscope.errors import InputError
from dynscope.reading.run import Run
from dynscope.runfile import storage
from dynscope.runfile.schema import Header, to_json


def check_path(path: Path, overwrite: bool, resume: bool) -> None:
    """Raise `InputError` where `RunWriter` may not write ``path``."""
    if overwrite and resume:
        raise InputError("overwrite=True and resume=True exclude each other", exit_code=2)
    if path.is_dir():
        raise InputError(f"{path}: is a directory; name a file in it")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is not a regular file; choose another path")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the directory {path.parent} does not exist")
    if not path.exists() or resume:
        return
    if not overwrite:
        raise InputError(
            f"{path}: exists already; choose another path, or pass resume=True to continue it or "
            "overwrite=True to replace it"
        )
    if path.stat().st_size:
        try:
            with storage.reading(path):
                pass
        except InputError as error:
            raise InputError(
                f"not overwritten, {error}; delete it yourself if you mean it"
            ) from None


def history(old: Run, new: Header) -> tuple[Mapping[str, Any], ...]:
    """The segments of a run that is resumed, with its last one if the next differs from it."""
    told = ("config", "settings", "versions")
    before = {key: getattr(old.metadata, key) for key in told}
    earlier = old.metadata.segments
    if before == {key: json.loads(to_json(getattr(new, key))) for key in told}:
        return earlier
    first = earlier[-1]["until"] + 1 if earlier else 0
    return (*earlier, {"segment": first, "until": old.segments - 1, **before})
