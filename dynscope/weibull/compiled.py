"""The loops of counting and fitting, compiled by numba (extra ``fast``).

Each does what a few lines of numpy beside its only caller do, who takes those without numba. Importing
this module takes about a second the first time: only many values are worth it (`dynscope.weibull.loops`).
"""

from collections.abc import Callable
from math import exp, inf, log, sqrt
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    return cast(F, numba.njit(nogil=True, cache=True)(function))


def _in_any_order(function: F) -> F:
    """Sums may be taken in any order, so that several are taken at once."""
    return cast(
        F, numba.njit(nogil=True, cache=True, fastmath={"reassoc", "nsz", "contract"})(function)
    )


@_compiled
def count_patterns(patterns: Array, counts: Array) -> None:
    """Of four rows of ``counts`` neighbours go to different ones, so that none waits for the other."""
    whole = len(patterns) // 4 * 4 if len(counts) == 4 else 0
    for i in range(0, whole, 4):
        counts[0, patterns[i]] += 1
        counts[1, patterns[i + 1]] += 1
        counts[2, patterns[i + 2]] += 1
        counts[3, patterns[i + 3]] += 1
    for i in range(whole, len(patterns)):
        counts[0, patterns[i]] += 1


@_compiled
def pack(
    patterns: Array, first: Any, packed: Array,
    magnitude: Any, shift: Any, fine: Any, mask: Any, one: Any,
) -> int:  # fmt: skip
    """``packed[bucket] += one + rest`` up to the first that has no bucket: its place, or their number.

    Those whose bits in use are all zero are passed over.
    """
    size = np.uint64(len(packed))
    for i in range(len(patterns)):
        pattern = patterns[i] & magnitude
        used = pattern >> fine
        bucket = np.uint64(pattern >> shift) - first
        if used and bucket < size:
            packed[bucket] += one + np.uint64(used & mask)
        elif used:
            return i
    return len(patterns)


@_compiled
def unpack(
    packed: Array, most: int, exponent: int, denormal: int, sum_bits: int, rest: int, few: int
) -> tuple[Array, Array, float]:
    """Mean level and count of the buckets that are not empty, at ``most`` so many.

    The third is the sum of the squared counts of buckets of more than a ``few`` values that are unlike.
    ``packed`` has a row per octave, the first with this ``exponent``; those at ``denormal`` have no
    leading one.
    """
    most = min(most, packed.size)
    levels, counts = np.empty(most), np.empty(most, np.int64)
    mask = (np.uint64(1) << np.uint64(sum_bits)) - np.uint64(1)
    share, seen, unlike = 2.0**-rest, 0, 0.0
    for octave in range(packed.shape[0]):
        start = 2.0 ** max(exponent + octave, denormal + 1)
        width = start / packed.shape[1]
        if exponent + octave == denormal:
            start = 0.0
        for place in range(packed.shape[1]):
            both = packed[octave, place]
            if both:
                count, rests = both >> np.uint64(sum_bits), both & mask
                counts[seen] = count
                levels[seen] = start + width * (place + rests * share / count)
                if count > few and rests % count:
                    unlike += float(count) * float(count)
                seen += 1
    return levels[:seen], counts[:seen], unlike


@_in_any_order
def sums(values: Array, patterns: Array, magnitude: Any) -> tuple[float, float, Any]:
    """The sum and the sum of squares in float64, and the bits of the largest magnitude."""
    total = squares = 0.0
    largest = patterns[0] & magnitude
    for i in range(len(values)):
        value = np.float64(values[i])
        total += value
        squares += value * value
        largest = max(largest, patterns[i] & magnitude)
    return total, squares, largest


@_compiled
def runs(ordered: Array) -> tuple[Array, Array]:
    """The distinct values as float64, and how often each occurs."""
    levels, counts = np.empty(len(ordered)), np.empty(len(ordered), np.int64)
    last = -1
    for i in range(len(ordered)):
        if last >= 0 and ordered[i] == levels[last]:
            counts[last] += 1
        else:
            last += 1
            levels[last], counts[last] = ordered[i], 1
    return levels[: last + 1], counts[: last + 1]


@_compiled
def positions(counts: Array, n: int, low: float, high: float) -> tuple[Array, int, Array, Array]:
    """As `dynscope.weibull.fits._positions`."""
    ranks, rank = np.empty(len(counts), np.int64), 0
    for i in range(len(counts)):
        rank += counts[i]
        ranks[i] = rank
    start = int(np.searchsorted(ranks, low * n, "right"))
    stop = min(int(np.searchsorted(ranks, high * n)) + 1, len(ranks))
    p, weight, share = np.empty(stop - start), np.empty(stop - start), 1 / n
    for i in range(stop - start):
        weight[i] = counts[start + i] * share
        p[i] = ranks[start + i] * share - 0.5 * weight[i]
    if start < stop:
        weight[0] = ranks[start] / n - max(low, (ranks[start] - counts[start]) / n)
        weight[-1] += min(0.0, high - ranks[stop - 1] / n)
    return ranks, start, p, weight


@_in_any_order
def line(x: Array, y: Array, weight: Array) -> tuple[float, float, float]:
    """As `dynscope.weibull.fits._line`."""
    total = x_mean = y_mean = 0.0
    for i in range(len(x)):
        total += weight[i]
        x_mean += weight[i] * x[i]
        y_mean += weight[i] * y[i]
    x_mean /= total
    y_mean /= total
    xx = xy = yy = 0.0
    for i in range(len(x)):
        x[i] -= x_mean
        y[i] -= y_mean
        xx += weight[i] * x[i] * x[i]
        xy += weight[i] * x[i] * y[i]
        yy += weight[i] * y[i] * y[i]
    return xy / xx, exp(x_mean - y_mean * xx / xy), xy * xy / (xx * yy)


@_compiled
def error(x: Array, y: Array, weight: Array, k: float, above: float) -> float:
    """As `dynscope.weibull.fits._standard_error`."""
    total = first = second = xx = 0.0
    for i in range(len(x)):
        if i:
            slope = (y[i] + y[i - 1]) / 2 - k * (x[i] + x[i - 1])
            total += slope * (x[i] - x[i - 1])
        first += weight[i] * total
        second += weight[i] * total * total
        xx += weight[i] * x[i] * x[i]
    first += above * total
    second += above * total * total
    return sqrt(max(second - first * first, 0.0)) / xx


@_compiled
def distance(levels: Array, counts: Array, ranks: Array, k: float, lam: float) -> float:
    """As `dynscope.weibull.fits._distance`, halving again and again what its bound does not exclude."""
    n, last, log_lam = ranks[-1], len(levels) - 1, log(lam)
    found: float = 0.0
    for i in range(0, last + 1, max(1, last // 64)):
        found = max(found, _gap(levels, counts, ranks, i, k, log_lam))
    ends, fitted = np.empty(64, np.int64), np.empty(64)  # of the parts to the right of this one
    ends[0], fitted[0] = last, _distribution(levels[last], k, log_lam)
    first, at_first, waiting = 0, _distribution(levels[0], k, log_lam), 1
    while waiting:
        end, at_end = ends[waiting - 1], fitted[waiting - 1]
        below = (ranks[first] - counts[first]) / n
        worth_it = max(ranks[end] / n - at_first, at_end - below) > found
        if worth_it and end - first > 8:
            ends[waiting] = (first + end) // 2
            fitted[waiting] = _distribution(levels[ends[waiting]], k, log_lam)
            waiting += 1
            continue
        if worth_it:
            for i in range(first, end + 1):
                found = max(found, _gap(levels, counts, ranks, i, k, log_lam))
        first, at_first, waiting = end, at_end, waiting - 1
    return found


@_compiled
def _gap(levels: Array, counts: Array, ranks: Array, i: int, k: float, log_lam: float) -> float:
    """The distance at the edges of a level's cell."""
    n, level = ranks[-1], levels[i]
    after = levels[i + 1] if i + 1 < len(levels) else inf
    before = levels[i - 1] if i > 0 else -level
    end = min(level * (1 + 2.0**-8), (level + after) / 2)
    start = max(level * (1 - 2.0**-8), (level + before) / 2)
    above: float = ranks[i] / n - _distribution(end, k, log_lam)
    below: float = _distribution(start, k, log_lam) - (ranks[i] - counts[i]) / n
    return max(abs(above), abs(below))


@_compiled
def _distribution(x: float, k: float, log_lam: float) -> float:
    return 1 - exp(-exp(k * (log(x) - log_lam)))
