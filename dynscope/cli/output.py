"""Where a verb writes, and how it says what it is doing."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from dynscope.errors import InputError

if TYPE_CHECKING:
    from dynscope.reports import Report


class Progress:
    """Says on a terminal what is being done, once it takes longer than a second."""

    def __init__(self, verb: str = "Drawing") -> None:
        self._verb = verb

    def __enter__(self) -> Callable[[str], None]:
        self._start, self._shown = monotonic(), False
        return self._tell

    def _tell(self, what: str) -> None:
        if sys.stderr.isatty() and monotonic() - self._start > 1:
            print(f"\r\033[K{self._verb}: {what} …", end="", file=sys.stderr, flush=True)
            self._shown = True

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def writable(output: Path, force: bool, runs: Iterable[Path]) -> Path:
    """``output``, when it may be written; asked before any work is done."""
    if any(output.exists() and run.exists() and output.samefile(run) for run in runs):
        raise InputError(f"{output}: is the run itself; give another --output", exit_code=2)
    if output.is_dir():
        raise InputError(f"{output}: is a directory; give a file name with --output", exit_code=2)
    if not output.parent.is_dir():
        raise InputError(f"{output}: the directory {output.parent} does not exist; create it first")
    if output.exists() and not force:
        raise InputError(f"{output}: exists already; --force writes over it, --output elsewhere")
    return output


def write_page(page: "Report", target: Path) -> None:
    write_whole(target, lambda part: part.write_bytes(page.html.encode()))


def write_whole(target: Path, fill: Callable[[Path], object]) -> None:
    """Write all of a file or nothing, so that an existing one is kept when this fails."""
    from dynscope.reports.elements import words

    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        fill(part)
        size = part.stat().st_size
        part.replace(target)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}; give another --output") \
            from None  # fmt: skip
    finally:
        part.unlink(missing_ok=True)
    print(f"Wrote {target} ({words.size(size)})")


def show(target: Path, wanted: bool) -> None:
    if wanted:
        import webbrowser

        webbrowser.open(target.resolve().as_uri())
