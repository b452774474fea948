"""The counting loops, compiled by numba (extra ``fast``); `dynscope.weibull.histogram` does without it too.

Importing this module takes about a second the first time: only large tensors are worth it.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _count_patterns(patterns: Array, counts: Array) -> None:
    """``counts`` (4, patterns): neighbours go to different rows, so that none waits for the other."""
    whole = len(patterns) // 4 * 4
    for i in range(0, whole, 4):
        counts[0, patterns[i]] += 1
        counts[1, patterns[i + 1]] += 1
        counts[2, patterns[i + 2]] += 1
        counts[3, patterns[i + 3]] += 1
    for i in range(whole, len(patterns)):
        counts[0, patterns[i]] += 1


def _count_rounded(
    patterns: Array, values: Array, magnitude: Any, infinity: Any, half: Any, shift: Any,
    counts: Array, sums: Array,
) -> None:  # fmt: skip
    """Rounded magnitudes into ``counts``; sum, sum of squares, absmax of finite ones into ``sums``."""
    total, squares, largest = sums[0], sums[1], sums[2]
    for i in range(len(patterns)):
        pattern = patterns[i] & magnitude
        if pattern >= infinity:
            counts[infinity >> shift] += 1
        else:
            counts[(pattern + half) >> shift] += 1
            value = np.float64(values[i])
            total += value
            squares += value * value
            largest = max(largest, abs(value))
    sums[0], sums[1], sums[2] = total, squares, largest


_compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True)

count_patterns: Callable[..., None] = _compiled(_count_patterns)
count_rounded: Callable[..., None] = _compiled(_count_rounded)
