"""Calls to a writer as bytes: what goes over the pipe, and the bounded queue in front of it.

A packet is two little-endian 64-bit lengths, the name of the call in 16 bytes, a JSON header with its
arguments and the shapes of its arrays, and the arrays' raw bytes. No pickle: nothing of the sender
runs in the writer.
"""

import json
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from dynscope.runfile.schema import to_json
from dynscope.site import Parameter, Site

Array = np.ndarray[Any, Any]

REPLY = "dynscope-writer: "  # begins a line that the writer process answers with

_PREFIX = struct.Struct("<QQ16s")


@dataclass(frozen=True)
class Message:
    """One call of a writer's method."""

    call: str
    arguments: dict[str, Any]
    arrays: dict[str, Array]

    def apply(self, writer: Any) -> None:
        """Make the call on a `dynscope.writing.writer.RunWriter`.

        OSError when the file cannot be written any more; a call that makes no sense becomes an
        event in the file.
        """
        try:
            getattr(writer, self.call)(**self._typed())
        except OSError:
            raise
        except Exception as error:
            reason = f"{self.call} was not recorded: {error!r}"
            writer.event(writer.last_step, time.time(), "error", reason)

    def _typed(self) -> dict[str, Any]:
        arguments = dict(self.arguments)
        if self.call == "sites":
            arguments["sites"] = [
                Site(**{**s, "aliases": tuple(s["aliases"])}) for s in arguments["sites"]
            ]
        elif self.call == "parameters":
            arguments["parameters"] = [
                Parameter(**{**p, "shape": tuple(p["shape"])}) for p in arguments["parameters"]
            ]
        elif self.call in ("row", "weights"):
            arguments["arrays"] = self.arrays
        return arguments


def pack(call: str, arguments: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """A message as one packet; the arrays are copied, so the caller may reuse them."""
    shapes = [[name, a.dtype.str, a.shape] for name, a in arrays.items()]
    head = to_json({"arguments": arguments, "arrays": shapes}).encode()
    body = b"".join([a.tobytes() for a in arrays.values()])
    return b"".join([_PREFIX.pack(len(head), len(body), call.encode()), head, body])


def receive(stream: BinaryIO) -> bytes | None:
    """The next whole packet, or None when the stream ends, be it in the middle of one."""
    prefix = _exactly(stream, _PREFIX.size)
    if prefix is None:
        return None
    rest = _exactly(stream, sum(_PREFIX.unpack(prefix)[:2]))
    return None if rest is None else prefix + rest


def _exactly(stream: BinaryIO, size: int) -> bytes | None:
    content = stream.read(size)
    return content if len(content) == size else None


def call_of(packet: bytes) -> str:
    name: bytes = _PREFIX.unpack_from(packet)[2]
    return name.rstrip(b"\0").decode()


def unpack(packet: bytes) -> Message:
    start = _PREFIX.size + _PREFIX.unpack_from(packet)[0]
    head = json.loads(packet[_PREFIX.size : start])
    arrays = {}
    for name, dtype, shape in head["arrays"]:
        count = int(np.prod(shape, dtype=int))
        arrays[name] = np.frombuffer(packet, dtype, count, start).reshape(shape)
        start += arrays[name].nbytes
    return Message(call_of(packet), head["arguments"], arrays)


class Backlog:
    """A queue of packets bounded by their bytes; a lone packet of any size always fits."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._packets: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()

    def offer(self, packet: bytes, *, wait: bool = False, force: bool = False) -> bool:
        """Append a packet; False, and not appended, when the queue is full.

        With ``wait`` it stays until there is room, with ``force`` it ignores the limit.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._fits(packet))
            if not force and not self._fits(packet):
                return False
            self._packets.append(packet)
            self._bytes += len(packet)
            self._changed.notify_all()
            return True

    def _fits(self, packet: bytes) -> bool:
        return not self._packets or self._bytes + len(packet) <= self._limit

    def take(self, timeout: float) -> bytes | None:
        """The oldest packet, or None when none came in ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._packets), timeout):
                return None
            packet = self._packets.popleft()
            self._bytes -= len(packet)
            self._changed.notify_all()
            return packet
