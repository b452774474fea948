"""The writer as a process of its own: started by `dynscope.writing.feed`, fed through its standard input.

It outlives whatever ends the training: it ignores the signals that stop a job, ends when its input
ends or its parent is gone, and then closes the file. It leaves by ``os._exit``, because HDF5 may
crash an interpreter that exits normally after a failed write.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from dynscope.errors import InputError
from dynscope.runfile.schema import Header
from dynscope.writing.message import REPLY, Backlog, receive, unpack
from dynscope.writing.writer import RunWriter

POLL = 0.25  # seconds between two looks at the parent and the clock
WAITING = 256 * 1024 * 1024  # bytes read ahead, so that they survive the training process
END = b""  # the input has ended


def main() -> NoReturn:
    """Open the run that the first packet names, write what follows, close it, leave."""
    for name in ("SIGINT", "SIGHUP", "SIGTERM", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    packet = receive(sys.stdin.buffer)
    if packet is None:
        os._exit(1)
    opening = unpack(packet).arguments
    try:
        writer = RunWriter(
            opening["path"],
            Header.from_json(opening["header"]),
            overwrite=opening["overwrite"],
            resume=opening["resume"],
            sign=lambda: _reply(
                1,
                {
                    "busy": f"{opening['path']}: the long file is still being read, or closed by its last writer"
                },
            ),
        )
    except InputError as error:
        _reply(1, {"error": str(error), "exit_code": error.exit_code})
        os._exit(1)
    resumed_at = opening["start_step"]
    tokens = writer.tokens_at(writer.last_step if resumed_at is None else resumed_at)
    _reply(1, {"last_step": writer.last_step, "tokens": tokens})
    answers = _let_go_of_output()
    try:
        _serve(writer, opening["parent"])
    except Exception as error:
        writer.abandon()
        _reply(answers, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os._exit(0)


def _reply(descriptor: int, content: dict[str, Any]) -> None:
    try:
        os.write(descriptor, f"{REPLY}{json.dumps(content)}\n".encode())
    except OSError:
        pass  # nobody listens any more


def _let_go_of_output() -> int:
    """Point the standard outputs nowhere and keep a private way to answer."""
    answers = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    return answers


def _serve(writer: RunWriter, parent: int) -> None:
    backlog = Backlog(WAITING)
    threading.Thread(target=_read_ahead, args=(backlog,), daemon=True).start()
    step = writer.last_step
    while True:
        packet = backlog.take(POLL)
        if packet == END or (packet is None and os.getppid() != parent):
            break
        if packet is not None:
            message = unpack(packet)
            step = message.arguments.get("step", step)
            message.apply(writer)
            if message.call == "close":
                return
        writer.flush_if_due()
    writer.event(step, time.time(), "end", "the training process ended without closing the run")
    writer.close()


def _read_ahead(backlog: Backlog) -> None:
    while (packet := receive(sys.stdin.buffer)) is not None:
        backlog.offer(packet, wait=True)
    backlog.offer(END, force=True)
