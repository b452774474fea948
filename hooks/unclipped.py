"""What gradients were before somebody clipped them: read at the end of each backward."""

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

Squares = tuple[Tensor | float, Tensor | float, Tensor | float]
"""Sum of squares, non-finite count and largest magnitude of a gradient."""


class _Reading(NamedTuple):
    gradient: "weakref.ref[Tensor]"
    version: int
    squares: Squares


class Unclipped:
    """The last readings of every parameter's gradient, by the parameter's number.

    With accumulation only the last backward of a step matters. How many there are is learned from
    the step before, so that the earlier ones need not be read.
    """

    def __init__(self) -> None:
        self._readings: dict[int, _Reading] = {}
        self._ends = self._expected = 0
        self.unreadable = ""  # why nothing can be told of this step

    def due(self) -> bool:
        """Whether the backward that ends now is to be read."""
        self._ends += 1
        return self._ends >= self._expected

    def keep(self, i: int, gradient: Tensor, squares: Squares) -> None:
        self._readings[i] = _Reading(weakref.ref(gradient), gradient._version, squares)

    def clipped(self, gradients: Sequence[Tensor | None]) -> Iterator[tuple[int, Squares]]:
        """What each gradient was before it was clipped; nothing where no clipping can be told.

        Clipping writes to every gradient that it is given once, or puts another tensor in its
        place. If gradients differ in how often they were written to since the last backward, or
        one was not there yet, that backward was not whole, and nothing is known.
        """
        present = {i: g for i, g in enumerate(gradients) if g is not None}
        writes: set[int] = set()
        for i, gradient in present.items():
            read = self._readings.get(i)
            if read is None:
                self.unreadable = _NOT_WHOLE if self._readings else ""
                return
            same = read.gradient() is gradient
            writes.add(gradient._version - read.version if same else _REPLACED)
        if len(writes - {0}) > 1:
            self.unreadable = _NOT_WHOLE
        elif writes - {0}:
            for i in present:
                yield i, self._readings[i].squares

    def finish(self) -> None:
        """The step has been taken."""
        self._readings.clear()
        self._expected, self._ends = self._ends, 0
        self.unreadable = ""


_REPLACED = -1
_NOT_WHOLE = "the gradients at the end of the last backward were not those that were clipped"
