"""The training process's end of a run file: hand rows over, never wait, never raise.

Rows go through a bounded queue and a thread to a writer, which is a process of its own
(`dynscope.writing.link`). Training may be killed at any moment and the writer finishes the file; the
writer may stall, die or find the disk full and training goes on.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dynscope.errors import InputError
from dynscope.runfile.schema import Header
from dynscope.site import Parameter, Site
from dynscope.writing.link import CLOSE, Link, NoProcess, Opening, ProcessLink, ThreadLink
from dynscope.writing.message import Array, Backlog, pack

log = logging.getLogger("dynscope")

WAITING = 256 * 1024 * 1024  # bytes kept for a writer that does not keep up; more is dropped
CLOSE_SECONDS = 60.0


class Feed:
    """A run file being written elsewhere; has the methods of `dynscope.writing.writer.RunWriter`.

    ``last_step`` is that of a resumed run, and ``tokens`` those seen until ``start_step``, or until
    the end. Construction refuses what `RunWriter` refuses, with `InputError`. From then on nothing raises
    or waits: rows that the writer cannot take are dropped and counted in ``/coverage``, and
    ``failure`` says what stopped it. In a forked child all methods do nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header,
        *,
        overwrite: bool = False,
        resume: bool = False,
        start_step: int | None = None,
    ) -> None:
        self.path = os.path.realpath(path)
        self._dropped: list[int] = []
        self._complained = False
        _close_predecessor(self.path, replaced=overwrite or resume)
        opening = Opening(self.path, header, overwrite, resume, start_step)
        without, link = "", None
        try:
            link = ProcessLink(opening)
        except NoProcess as error:
            without = str(error)
        self._pump = Pump(self.path, link or ThreadLink(opening))
        self.last_step, self.tokens = self._pump.link.last_step, self._pump.link.tokens
        weakref.finalize(self, self._pump.end).atexit = False
        if without:
            log.warning("dynscope: a thread of this process writes the run: %s", without)
            reason = f"a thread of the training process writes the run: {without}"
            self.event(self.last_step, time.time(), "writer", reason)

    @property
    def failure(self) -> str | None:
        """Why nothing is written any more, or None."""
        return self._pump.failure

    def sites(self, sites: Sequence[Site], *, anew: bool = False) -> None:
        self._send("sites", sites=[asdict(site) for site in sites], anew=anew)

    def parameters(self, parameters: Sequence[Parameter], *, anew: bool = False) -> None:
        described = [asdict(parameter) for parameter in parameters]
        self._send("parameters", parameters=described, anew=anew)

    def row(
        self,
        step: int,
        time: float,
        arrays: Mapping[str, Array],
        *,
        via: str = "values",
        tokens: int = -1,
        cost: float = float("nan"),
    ) -> None:
        clock = {"time": float(time), "tokens": int(tokens), "cost": float(cost)}
        self._send("row", arrays, step=step, via=via, **clock)

    def weights(
        self, step: int, time: float, arrays: Mapping[str, Array], *, via: str = "values"
    ) -> None:
        self._send("weights", arrays, step=step, time=time, via=via)

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._send("scalars", step=step, time=time, values=values)

    def event(self, step: int, time: float, kind: str, message: str) -> None:
        self._send("event", step=step, time=time, kind=kind, message=message)

    def coverage(self, step: int, kind: str, path: str, metric: str, reason: str) -> None:
        self._send("coverage", step=step, kind=kind, path=path, metric=metric, reason=reason)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Have everything written and the file closed; may be called twice.

        After ``timeout`` seconds the writer is left to finish by itself.
        """
        if self._dropped:
            self._pump.offer(self._lost(), force=True)
            self._dropped = []
        self._pump.end()
        self._pump.join(timeout)

    def _send(self, call: str, arrays: Mapping[str, Array] | None = None, **arguments: Any) -> None:
        if self._pump.ended:
            return
        try:
            if "step" in arguments:
                arguments["step"] = int(arguments["step"])  # numpy and torch integers too
            if "values" in arguments:
                arguments["values"] = {k: float(v) for k, v in arguments["values"].items()}
            self._offer(pack(call, arguments, arrays or {}), call, arguments.get("step", 0))
        except Exception as error:
            if not self._complained:
                self._complained = True
                log.warning("dynscope: %s was not recorded: %r", call, error)

    def _offer(self, packet: bytes, call: str, step: int) -> None:
        if self._dropped and self._pump.offer(self._lost()):
            self._dropped = []
        described = call in ("sites", "parameters")  # without these later rows have no columns
        if not self._pump.offer(packet, force=described):
            self._dropped.append(step)

    def _lost(self) -> bytes:
        first, last, count = self._dropped[0], self._dropped[-1], len(self._dropped)
        reason = f"{count} messages of steps {first} to {last} dropped: the writer did not keep up"
        gap = {"step": first, "kind": "rows", "path": "", "metric": "", "reason": reason}
        return pack("coverage", gap, {})


class Pump:
    """The thread between the queue and the writer; knows nothing of the `Feed` that fills it."""

    def __init__(self, path: str, link: Link) -> None:
        self.link = link
        self.failure: str | None = None
        self.ended = False
        self._path = path
        self._backlog = Backlog(WAITING)
        self._thread = threading.Thread(target=self._run, name="dynscope-feed", daemon=True)
        _pumps[path] = self
        self._thread.start()

    def offer(self, packet: bytes, *, force: bool = False) -> bool:
        """Queue a packet; False when the queue is full. Whatever comes after the end is ignored."""
        return self.ended or bool(self.failure) or self._backlog.offer(packet, force=force)

    def end(self) -> None:
        """Have the file closed after what waits in the queue."""
        if not (self.ended or self.failure):
            self._backlog.offer(CLOSE, force=True)
            self.ended = True

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("dynscope: the writer is still busy, it will finish %s", self._path)

    def _run(self) -> None:
        try:
            packet: bytes | None = None
            while packet != CLOSE:
                packet = self._backlog.take(0.25)
                if packet is None:
                    self.link.idle()
                else:
                    self.link.send(packet)
        except Exception as error:
            self.failure = str(error)
            log.warning("dynscope: recording has stopped, training goes on: %s", error)
        finally:
            if _pumps.get(self._path) is self:
                del _pumps[self._path]


_pumps: dict[str, Pump] = {}  # what this process is writing, by path


def _close_predecessor(path: str, *, replaced: bool) -> None:
    """The same cell of a notebook run twice: the earlier recording ends when this replaces it."""
    pump = _pumps.get(path)
    if pump is None:
        return
    if not (replaced or pump.ended):
        raise InputError(
            f"{path}: this process is recording to it; close that recording first, or pass "
            "overwrite=True to replace it or resume=True to continue it"
        )
    pump.end()
    pump.join(CLOSE_SECONDS)


def _close_all() -> None:
    pumps = list(_pumps.values())
    for pump in pumps:
        pump.end()
    for pump in pumps:
        pump.join(CLOSE_SECONDS)


def _disown_all() -> None:
    """In a forked child: a data-loader worker that held the pipe would keep the writer waiting."""
    for pump in _pumps.values():
        pump.ended = True  # its lock may be held by a thread that does not exist here
        pump.link.disown()
    _pumps.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
