"""What the file and the log are told besides values: gaps, failures and errors of ours, each once."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from dynscope.writing.feed import Feed

log = logging.getLogger("dynscope")


class Telling:
    """Shared by all that watches the model; ``steps`` gives the number of optimizer steps done."""

    def __init__(self, feed: Feed, steps: Callable[[], int]) -> None:
        self._feed, self._steps = feed, steps
        self._told: set[tuple[str, str]] = set()

    def tell(self, kind: str, message: str) -> None:
        """Say something in the log and in the file."""
        log.info("dynscope: %s", message)
        self._feed.event(self._steps(), time.time(), kind, message)

    def once(self, what: str) -> bool:
        """Whether this is asked for the first time: nobody wants to be told twice."""
        known = ("", what) in self._told
        self._told.add(("", what))
        return not known

    def missing(self, step: int | None, kind: str, path: str, metric: str, reason: str) -> None:
        """Say once why ``metric`` at ``path`` is not in the file; ``step`` None: the one in progress."""
        if (path, metric) not in self._told:
            self._told.add((path, metric))
            at = self._steps() + 1 if step is None else step
            self._feed.coverage(at, kind, path, metric, reason)

    def failed(self, path: str, reason: str, metric: str = "") -> None:
        """A site or parameter, or a metric there, cannot be read and goes quiet; the run goes on."""
        what = " ".join(filter(None, (metric, path))) or "the model"
        log.warning("dynscope: %s is no longer recorded: %s", what, reason)
        step = self._steps() + 1
        self._feed.event(step, time.time(), "failure", f"{what}: {reason}")
        self.missing(step, "failure", path, metric, reason)

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Keep an error of ours from the training, and tell it once."""
        try:
            yield
        except Exception as error:
            if self.once(what):
                log.warning("dynscope: error in %s, the training goes on", what, exc_info=True)
                reason = f"error in {what}: {named(error)}"
                self._feed.event(self._steps(), time.time(), "failure", reason)


def named(error: Exception) -> str:
    """Type and message, in one line of their own."""
    return f"{type(error).__name__}: {error}"
