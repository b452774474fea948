"""The ways from a training process to a writer: a process of its own, or else a thread.

This module imports no HDF5 library unless no process can be started.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dynscope.errors import DynscopeError, InputError
from dynscope.runfile.schema import Header
from dynscope.writing.message import REPLY, call_of, pack, unpack

log = logging.getLogger("dynscope")

CLOSE = pack("close", {}, {})  # the last packet of a run
START_SECONDS = 60.0
RESTARTS = 3

# The child finds the dynscope that runs here, however it was found here: see `search_path`.
_CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from dynscope.writing.process import main; main()"
)


class WriterStopped(DynscopeError):
    """The writer cannot go on; the message says why."""


class NoProcess(DynscopeError):
    """A process of its own cannot be started here; the message says why."""


class Link(Protocol):
    """A way to a writer. ``last_step`` and ``tokens`` are what the file held when it was opened."""

    last_step: int
    tokens: int

    def send(self, packet: bytes) -> None:
        """Have the writer make a call; raises when the writer cannot go on."""

    def idle(self) -> None:
        """Called again and again while there is nothing to send."""

    def disown(self) -> None:
        """In a forked child: let go of what belongs to the training process."""


@dataclass(frozen=True)
class Opening:
    """Which file to write, and how: `dynscope.writing.feed.Feed`'s arguments."""

    path: str
    header: Header
    overwrite: bool = False
    resume: bool = False
    start_step: int | None = None


class ThreadLink:
    """The writer in this process, called by the thread that sends."""

    def __init__(self, o: Opening) -> None:
        from dynscope.writing.writer import RunWriter

        self._writer = RunWriter(o.path, o.header, overwrite=o.overwrite, resume=o.resume)
        self.last_step = self._writer.last_step
        self.tokens = self._writer.tokens_at(
            self.last_step if o.start_step is None else o.start_step
        )

    def send(self, packet: bytes) -> None:
        try:
            unpack(packet).apply(self._writer)
        except Exception:
            self._writer.abandon()
            raise

    def idle(self) -> None:
        self._writer.flush_if_due()

    def disown(self) -> None:
        pass


class ProcessLink:
    """The writer in a process of its own, started again when it is killed."""

    def __init__(self, opening: Opening) -> None:
        self._opening = {
            "path": opening.path,
            "header": opening.header.to_json(),
            "overwrite": opening.overwrite,
            "resume": opening.resume,
            "start_step": opening.start_step,
            "parent": os.getpid(),
        }
        self._described: list[bytes] = []  # sites and parameters, told again to the next writer
        self._restarts = 0
        self.last_step, self.tokens = self._start()

    def send(self, packet: bytes) -> None:
        while True:
            try:
                self._write(packet)
                break
            except OSError:
                self._restart()
        if packet == CLOSE:
            self._finish()
        elif call_of(packet) in ("sites", "parameters"):
            self._described.append(packet)

    def idle(self) -> None:
        if self._process.poll() is not None:
            self._restart()

    def disown(self) -> None:
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()

    def _write(self, packet: bytes) -> None:
        assert self._process.stdin
        view = memoryview(packet)
        while view:
            view = view[self._process.stdin.write(view) :]

    def _finish(self) -> None:
        self.disown()
        answer = self._last_answer()
        if self._process.wait() != 0:
            raise WriterStopped(answer or f"the writer ended with {self._process.returncode}")

    def _start(self) -> tuple[int, int]:
        """Start a writer; returns the last step of its file and the tokens seen until the start.

        Raises `InputError` when it refuses.
        """
        if getattr(sys, "frozen", False) or not sys.executable:
            raise NoProcess("this program has no Python interpreter to start")
        command = [sys.executable, "-P", "-W", "ignore", "-c", _CHILD, json.dumps(search_path())]
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # never ours, or `train | tee` would wait for the writer
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C and a closed terminal are not its business
                env=os.environ | {"HDF5_USE_FILE_LOCKING": "FALSE", "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError as error:
            raise NoProcess(f"no process could be started ({error})") from error
        with suppress(OSError):  # a child that is gone already says why in its output
            self._write(pack("open", self._opening, {}))
        return self._handshake()

    def _handshake(self) -> tuple[int, int]:
        assert self._process.stdout
        last = b""
        answer: dict[str, Any] = {}
        while not answer and (line := self._line()):
            last, answer = line, _parse(line)
            if busy := answer.pop("busy", ""):
                log.warning("dynscope: %s", busy)
        if "last_step" in answer:
            return int(answer["last_step"]), int(answer["tokens"])
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self.disown()
        if "error" in answer:
            raise InputError(answer["error"], answer["exit_code"])
        raise NoProcess(
            f"the writer process did not start ({last.decode(errors='replace').strip()})"
        )

    def _line(self) -> bytes:
        """What the starting writer says next; it is killed when it says nothing for long."""
        assert self._process.stdout
        impatience = threading.Timer(START_SECONDS, self._process.kill)
        impatience.daemon = True
        impatience.start()
        line: bytes = self._process.stdout.readline()
        impatience.cancel()
        return line

    def _restart(self) -> None:
        """After the writer was killed: a new one that continues the file as the next segment."""
        answer, code = self._last_answer(), self._process.wait()
        self._restarts += 1
        if answer or self._restarts > RESTARTS:
            raise WriterStopped(answer or f"the writer was killed {self._restarts} times ({code})")
        self._opening |= {"resume": True, "overwrite": False}
        step, _ = self._start()
        reason = f"the writer process ended with {code} and was started again; rows may be missing"
        event = {"step": step, "time": time.time(), "kind": "writer", "message": reason}
        with suppress(OSError):  # killed again already: the next packet notices
            for packet in (*self._described, pack("event", event, {})):
                self._write(packet)

    def _last_answer(self) -> str | None:
        """Why the writer gave up, if it said so; waits for it to end."""
        assert self._process.stdout
        with self._process.stdout as output:
            answers = [_parse(line) for line in output.read().splitlines()]
        return next((str(a["error"]) for a in answers if "error" in a), None)


def _parse(line: bytes) -> dict[str, Any]:
    content = json.loads(line[len(REPLY) :]) if line.startswith(REPLY.encode()) else {}
    return dict(content)


def search_path() -> list[str]:
    """Where the writer process looks for modules: as here, but not beside the training script.

    A file of the user's that is called like a module the writer needs must not be found; so the
    working directory and the script's are left out, unless dynscope itself was found there.
    """
    home = str(Path(__file__).resolve().parents[2])
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    private = {os.path.realpath("."), os.path.realpath(Path(script or ".").parent)} - {home}
    places = [os.path.abspath(place) for place in sys.path if place]
    kept = [place for place in places if os.path.realpath(place) not in private]
    return kept if home in map(os.path.realpath, kept) else [*kept, home]
