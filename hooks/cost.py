"""What recording costs: measured, and on request kept below a share of the training's time."""

import contextlib
import time
from collections.abc import Iterator


class Cost:
    """Adds up the seconds that the training waits for the recorder; all but its one-time start.

    With a ``budget`` of 0.02 recording may take 2 % of the time since the start: a step that is due
    waits for a later one until what was spent, and what it is expected to cost, is below that.
    """

    def __init__(self, budget: float | None) -> None:
        self._budget = budget
        self._spent = self._expected = self._seconds = 0.0
        self._entered: float | None = None
        self._declined = self._told = 0
        self.start()

    def start(self) -> None:
        """Nothing counts that was before."""
        self._since, self._seconds = time.perf_counter(), 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time spent inside, once where such blocks are nested."""
        if self._entered is not None:
            yield
            return
        self._entered = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - self._entered
            self._entered = None

    def take(self, observed: float) -> float:
        """Seconds since the last call, with those ``observed`` in hooks: the cost of one row.

        What is done for a row after this (handing it over) and on steps between counts to the next.
        """
        if self._entered is not None:
            now = time.perf_counter()
            self._seconds += now - self._entered
            self._entered = now
        self._expected = self._seconds + observed
        self._spent += self._expected
        self._seconds = 0.0
        return self._expected

    def affordable(self) -> bool:
        """Whether one more row is within the budget."""
        if self._budget is None:
            return True
        allowed = self._budget * (time.perf_counter() - self._since)
        within = self._spent + self._seconds + self._expected <= allowed or not self._spent
        self._declined += not within
        return within

    def stretched(self) -> str:
        """What to tell once the interval is at least twice what was told last, or back to normal."""
        declined, self._declined = self._declined, 0
        if self._budget is None or not (
            declined >= 2 * self._told > 0 or bool(declined) != bool(self._told)
        ):
            return ""
        self._told = declined
        if not declined:
            return "recording is within its budget again"
        return (
            f"a recorded step costs {1e3 * self._expected:.1f} ms: to stay within "
            f"{self._budget:.0%} of the time, {declined} that were due were left out"
        )
