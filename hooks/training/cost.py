"""What recording costs: measured, and on request kept below a share of the training's time."""

import contextlib
import time
from collections.abc import Iterator


class Cost:
    """Adds up the seconds that the training waits for the recorder; all but its one-time start.

    With a ``budget`` of 0.02 recording may take 2 % of the time since the start: a step that is due
    waits for a later one until what was spent, and what it is expected to cost, is below that. So
    does measuring the weights; where both wait each has half of the budget.
    """

    def __init__(self, budget: float | None) -> None:
        self._budget = budget
        self._expected = self._expected_weighing = 0.0
        self._entered: float | None = None
        self._declined = self._told = 0
        self._weights_due = self._told_weights = False
        self.start()

    def start(self) -> None:
        """Nothing counts that was before."""
        self._since = time.perf_counter()
        self._rows = self._weights = 0.0  # spent on rows that are done, and on weights
        self._seconds = self._weighing = 0.0  # since the last row: all but the weights, and they

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

    @contextlib.contextmanager
    def weighing(self) -> Iterator[None]:
        """Count the time spent inside on the weights: it is not what the next row will cost."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            took = self._expected_weighing = time.perf_counter() - begun
            self._weights += took
            self._weighing += took
            if self._entered is not None:
                self._entered += took

    def take(self, observed: float) -> float:
        """Seconds since the last call, with those ``observed`` in hooks: the cost of one row.

        What is done for a row after this (handing it over) and on steps between counts to the next.
        """
        if self._entered is not None:
            now = time.perf_counter()
            self._seconds += now - self._entered
            self._entered = now
        self._expected = self._seconds + observed
        self._rows += self._expected
        cost = self._expected + self._weighing
        self._seconds = self._weighing = 0.0
        return cost

    def affordable(self) -> bool:
        """Whether one more row is within the budget."""
        rows = self._rows + self._seconds + self._expected
        within = self._fits(rows, self._weights, waits=self._weights_due) or not self._rows
        self._declined += not within
        return within

    def weights_affordable(self, due: bool) -> bool:
        """Whether the weights are to be measured now: they are ``due``, or have been since."""
        self._weights_due |= due
        weights = self._weights + self._expected_weighing
        rows = self._rows + self._seconds
        if self._weights_due and self._fits(weights, rows, waits=bool(self._declined)):
            self._weights_due = False
            return True
        return False

    def _fits(self, one: float, other: float, *, waits: bool) -> bool:
        """Whether both are within the budget, and ``one`` within half of it where the other waits."""
        if self._budget is None:
            return True
        allowed = self._budget * (time.perf_counter() - self._since)
        return one + other <= allowed and not (waits and 2 * one > allowed)

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

    def weights_stretched(self) -> str:
        """What to tell, once, when the weights have to wait."""
        if self._budget is None or self._told_weights or not self._weights_due:
            return ""
        self._told_weights = True
        return (
            f"measuring the weights costs {1e3 * self._expected_weighing:.1f} ms: to stay within "
            f"{self._budget:.0%} of the time it waits"
        )
