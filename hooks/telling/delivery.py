"""From the training loop to the feed: a row waits for its tokens, a thread for the device."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from dynscope.hooks.telling.telling import Telling
from dynscope.writing.feed import Feed

TOKEN_SECONDS = 0.5  # how long the first row waits for scope.step(tokens=...)


class Delivery:
    """Sends rows and scalars; ``tokens`` are those counted so far, -1 when none ever were.

    ``patient``: the tokens of a step may be told after its row was drained.
    """

    def __init__(self, feed: Feed, telling: Telling, *, patient: bool, tokens: int = -1) -> None:
        self.tokens = tokens
        self._feed, self._telling, self._patient = feed, telling, patient
        self._tokens_follow: bool | None = None  # whether scope.step tells them after a step
        self._held: Callable[[], None] | None = None
        self._sending = threading.Lock()
        self._drains = ThreadPoolExecutor(1, "dynscope-drain")

    def count(self, tokens: int) -> None:
        """Add ``tokens`` to those seen."""
        self.tokens = max(self.tokens, 0) + tokens
        self._tokens_follow = True

    def hold(self, send: Callable[[], None], *, on_host: bool) -> None:
        """Have a row sent as soon as its tokens are known; ``on_host``: nothing else to wait for."""
        self._held = send if on_host else lambda: self._submit(send)
        if not self._patient or self._tokens_follow is False:
            self.release()
        elif self._tokens_follow is None:  # they may come after the first row, or never
            patience = threading.Timer(TOKEN_SECONDS, self.release)
            patience.daemon = True
            patience.start()

    def release(self) -> None:
        """Send the row that waited for its tokens."""
        if self._held is None:
            return
        with self._sending:
            held, self._held = self._held, None
            if held is not None:
                self._tokens_follow = bool(self._tokens_follow)
                held()

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Send scalars; tensors on an accelerator are waited for by the thread."""
        now, ready = time.time(), _to_host(values)
        if ready is None:
            self._feed.scalars(step, now, self._numbers(values))
        else:
            rest = self._numbers({n: v for n, v in values.items() if not _waited_for(v)})
            self._submit(lambda: self._feed.scalars(step, now, rest | ready()))

    def close(self) -> None:
        """Wait for what was submitted."""
        self._drains.shutdown(wait=True)

    def _submit(self, work: Callable[[], None]) -> None:
        """Have ``work`` done by a thread that may wait for the device."""
        try:
            self._drains.submit(work)
        except RuntimeError:  # the interpreter is ending and starts no more threads
            work()

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Scalars as numbers; what is none is told and left out."""
        numbers = {}
        for name, value in values.items():
            with self._telling.guarded(f"log({name}=...)"):
                numbers[name] = float(value.detach() if isinstance(value, Tensor) else value)
        return numbers


def _waited_for(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda" and value.numel() == 1


def _to_host(values: Mapping[str, Any]) -> Callable[[], dict[str, float]] | None:
    """A later look at values that an accelerator still computes; None when all are at hand."""
    waiting = {name: value.detach() for name, value in values.items() if _waited_for(value)}
    if not waiting:
        return None
    stacked = torch.stack([value.double().reshape(()) for value in waiting.values()])
    host = torch.empty_like(stacked, device="cpu", pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def ready() -> dict[str, float]:
        done.synchronize()
        return dict(zip(waiting, host.tolist(), strict=True))

    return ready
