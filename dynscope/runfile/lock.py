"""One writer per path: a lock file beside the run that says who writes it.

HDF5's own locks are switched off on many clusters and missing on many network file systems, so
two jobs with one file name would corrupt it in silence. The lock of a process that is gone, or of
another machine that gave no sign of life for `SILENT` seconds, is taken over; a writer that is only
closing its file is waited for, since a training is often resumed before that is done.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynscope.errors import InputError

SILENT = 300.0  # seconds without a sign of life after which another machine's lock is taken over
PATIENCE = 600.0  # seconds to wait for a writer that is closing its file
SETTLE = 0.1  # seconds in which a second process that takes over at the same time shows itself


class Lock:
    """The right to write one path; refused with `InputError` while a living writer has it.

    ``sign`` is called at most every ten seconds while this waits or is touched.
    """

    def __init__(self, target: Path, sign: Callable[[], None] = lambda: None) -> None:
        self.path = target.with_name(target.name + ".lock")
        self._target = target
        self._identity = _identity(os.getpid()) | {"taken": time.time_ns()}
        self._mine = json.dumps(self._identity)
        self._sign = sign
        self._touched = time.monotonic()
        self._acquire()

    def _acquire(self) -> None:
        self._wait_for_closing()
        try:
            with self.path.open("x") as stream:
                stream.write(self._mine)
        except FileExistsError:
            self._take_over()
        except OSError as error:
            raise InputError(f"{self._target}: cannot be written ({error.strerror})") from None

    def _wait_for_closing(self) -> None:
        patience = time.monotonic() + PATIENCE
        while time.monotonic() < patience:
            holder = _read(self.path)
            if not (holder.get("closing") and self._is_alive(holder)):
                return
            self._give_sign()
            time.sleep(SETTLE)

    def _take_over(self) -> None:
        holder = _read(self.path)
        if self._is_alive(holder):
            raise InputError(
                f"{self._target}: another process writes this run "
                f"({str(holder.get('host', '?')).split('/')[0]}, process {holder.get('pid', '?')}); "
                f"choose another path, or delete {self.path.name} if that process is gone"
            )
        self._write()
        time.sleep(SETTLE)
        if self.path.read_text() != self._mine:
            raise InputError(f"{self._target}: another process has just begun to write this run")

    def _write(self) -> None:
        beside = self._beside()
        beside.write_text(self._mine)
        beside.replace(self.path)

    def _beside(self) -> Path:
        return self.path.with_name(f"{self.path.name}.{os.getpid()}")

    def _is_alive(self, holder: dict[str, Any]) -> bool:
        mine, pid = _identity(os.getpid()), holder.get("pid")
        if holder.get("host") == mine["host"] and isinstance(pid, int):
            return _identity(pid).items() <= holder.items()
        return self._silence() < SILENT

    def _silence(self) -> float:
        """Seconds since a sign of life, by the file system's clock: machines differ in theirs."""
        beside = self._beside()
        try:
            beside.touch()
            now = beside.stat().st_mtime
            return now - self.path.stat().st_mtime
        except OSError:  # the lock is gone, or nothing can be written here anyway
            return float("inf") if not self.path.exists() else 0.0
        finally:
            beside.unlink(missing_ok=True)

    def closing(self) -> None:
        """Tell others that the path will soon be free."""
        with suppress(OSError):
            if self.path.read_text() == self._mine:
                self._mine = json.dumps(self._identity | {"closing": True})
                self._write()

    def touch(self) -> None:
        """Give a sign of life, at most every ten seconds."""
        if self._give_sign():
            with suppress(OSError):
                os.utime(self.path)

    def _give_sign(self) -> bool:
        """Whether it was time for one."""
        due = time.monotonic() - self._touched > 10
        if due:
            self._touched = time.monotonic()
            self._sign()
        return due

    def release(self) -> None:
        """Give the path back; a lock that someone else took over meanwhile is left alone."""
        with suppress(OSError):
            if self.path.read_text() == self._mine:
                self.path.unlink()


def is_written(target: Path) -> bool:
    """Whether a living writer may have the run open; on another machine that cannot be known."""
    path = target.with_name(target.name + ".lock")
    holder = _read(path)
    here = _identity(os.getpid())["host"]
    if holder.get("host") == here and isinstance(holder.get("pid"), int):
        return _identity(holder["pid"]).items() <= holder.items()
    return path.exists()


def _read(path: Path) -> dict[str, Any]:
    """What a lock file says; nothing where it is gone, half-written or foreign."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _identity(pid: int) -> dict[str, Any]:
    """Machine (and the process namespace within it), process and when that process started.

    ``started`` tells a process from a later one of the same number; it is None where no such
    process runs or the system has no ``/proc`` to read it from.
    """
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return {
        "host": f"{socket.gethostname()}/{namespace}",
        "pid": pid if _runs(pid) else None,
        "started": _started(pid),
    }


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _started(pid: int) -> str | None:
    try:
        # The command name may hold blanks; the 20th field after it is the start time.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
