"""16-bit and 8-bit floats, which have so few magnitudes that each is counted as it is."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynscope.weibull.loops import WORTH_IT, loops
from dynscope.weibull.pieces import pieces

Array = NDArray[Any]


class Signed(NamedTuple):
    """Magnitudes that occur, ascending, with zero, and how often each occurs with either sign."""

    levels: NDArray[np.float64]
    positive: NDArray[np.int64]
    negative: NDArray[np.int64]


def count_narrow(values: Array) -> Signed:
    """The finite values of an array of narrow floats."""
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    levels, positive, negative = _finite_patterns(values.dtype)
    counts = np.append(_count(values.view(unsigned), 2 ** (8 * unsigned.itemsize)), 0)
    above, below = counts[positive], counts[negative]
    seen = (above > 0) | (below > 0)
    return Signed(levels[seen], above[seen], below[seen])


def _count(values: Array, patterns: int) -> NDArray[np.int64]:
    compiled = loops(values.size)
    if compiled is not None:
        rows = np.zeros((4 if values.size >= WORTH_IT else 1, patterns), np.int64)
        for piece in pieces(values):
            compiled.count_patterns(piece, rows)
        counts: NDArray[np.int64] = rows.sum(0)
        return counts
    counts = np.zeros(patterns, np.int64)
    for piece in pieces(values):
        counts += np.bincount(piece, minlength=patterns)
    return counts


@cache
def _finite_patterns(dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """Every finite magnitude, ascending, and its two bit patterns; one past all where it has but one."""
    patterns = np.arange(2 ** (8 * dtype.itemsize))
    with np.errstate(invalid="ignore"):
        value = patterns.astype(f"u{dtype.itemsize}").view(dtype).astype(np.float64)
    finite = np.isfinite(value)
    levels, place = np.unique(np.abs(value[finite]), return_inverse=True)
    found = np.full((2, len(levels)), len(patterns))
    found[np.signbit(value[finite]).astype(int), place] = patterns[finite]
    return levels, *found
