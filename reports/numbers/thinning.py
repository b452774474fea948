"""Fewer rows for drawing: which recorded steps a page shows."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynscope.reports.elements import words

Floats = NDArray[np.floating]
Rows = NDArray[np.int64]

FEWEST_ROWS = 24
MOST_ROWS = 300
MOST_POINTS = 1600
PAGE_BYTES = 5_200_000  # of drawn numbers; plotly.js takes 4.8 MB of the 12 MB a page may have
_CELL_BYTES = 16 / 3  # four bytes in base64


@dataclass(frozen=True)
class Drawn:
    """The rows of an axis that are drawn, of all its recorded steps.

    ``extremes`` is whether those of the largest loss, gradient and activation are among them.
    """

    rows: Rows
    steps: NDArray[np.int64]
    extremes: bool = False

    @property
    def drawn(self) -> NDArray[np.int64]:
        return self.steps[self.rows]

    @property
    def thinned(self) -> bool:
        return len(self.rows) < len(self.steps)

    @property
    def text(self) -> str:
        if not self.thinned:
            return f"Every one of {words.count(len(self.steps), 'recorded step')} is drawn."
        kept = "the first and the last"
        if self.extremes:
            kept = "the first, the last and those of the largest loss, gradient and activation"
        return (
            f"Depth charts and maps draw {words.integer(len(self.rows))} of "
            f"{words.count(len(self.steps), 'recorded step')}, evenly spaced, always with {kept}. "
            "The words and figures of the summary use all of them."
        )


def affordable_rows(columns: int, share: float = 1.0) -> int:
    """How many rows of ``columns`` numbers fit into this run's ``share`` of a page."""
    return int(np.clip(share * PAGE_BYTES / (_CELL_BYTES * max(columns, 1)), 2, MOST_ROWS))


def thin(steps: NDArray[np.int64], most: int, always: Iterable[int] = ()) -> Drawn:
    """At most about ``most`` evenly spaced rows, and besides these the rows ``always``."""
    total = len(steps)
    if total <= max(most, FEWEST_ROWS):
        return Drawn(np.arange(total), steps)
    even = np.linspace(0, total - 1, max(most, FEWEST_ROWS)).round().astype(np.int64)
    extra = np.array([row for row in always if 0 <= row < total], np.int64)
    return Drawn(np.union1d(even, extra), steps, extremes=len(extra) > 0)


def thin_line(values: Floats, most: int = MOST_POINTS) -> Rows:
    """Rows of a line that keep its shape: the lowest and highest of every stretch of rows."""
    total = len(values)
    if total <= most:
        return np.arange(total)
    stretch = -(-2 * total // most)
    finite = np.isfinite(values)
    ends = [np.zeros(1, np.int64), np.full(1, total - 1)]
    for missing, place in ((np.inf, np.argmin), (-np.inf, np.argmax)):
        padded = np.full(-(-total // stretch) * stretch, missing)
        padded[:total] = np.where(finite, values, missing)
        starts = np.arange(0, len(padded), stretch)
        ends.append(starts + place(padded.reshape(-1, stretch), axis=1))
    return np.unique(np.concatenate(ends))
