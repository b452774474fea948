"""The recorders of this process: ended with it, and silent in its forked children."""

import atexit
import os
import weakref
from pathlib import Path
from typing import Protocol

from dynscope.hooks.telling.telling import log


class Ends(Protocol):
    """What a recorder lets be done with it."""

    path: str
    closed: bool

    def close(self) -> None: ...

    def disown(self) -> None: ...


_recorders: "weakref.WeakSet[Ends]" = weakref.WeakSet()


def add(recorder: Ends) -> None:
    """End it with the process, if nobody does before."""
    _recorders.add(recorder)


def end_recording_of(path: Path) -> bool:
    """Close the recorder of this process that writes ``path``; whether there was one."""
    target = os.path.realpath(path)
    before = [each for each in _recorders if each.path == target and not each.closed]
    for recorder in before:
        log.warning("dynscope: %s is recorded anew, the recording until now is closed", target)
        recorder.close()
    return bool(before)


def _close_all() -> None:
    """The script has ended without `Recorder.close`."""
    for recorder in list(_recorders):
        recorder.close()


def _disown_all() -> None:
    """In a forked child the run belongs to the parent: data loaders and environments record not."""
    for recorder in list(_recorders):
        recorder.disown()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
