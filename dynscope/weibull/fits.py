"""The probability plot: k and lam from the line of ln(-ln(1 - F)) on ln|w|, and how good it is.

Source: Weibull weight magnitudes, arXiv 2605.18898; the standard error is ours.
"""

from dataclasses import dataclass, replace
from math import exp, hypot, log, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynscope.errors import InputError
from dynscope.weibull.histogram import LOG_EDGES, Histogram, count, log_bins
from dynscope.weibull.loops import loops
from dynscope.weibull.reasons import CONSTANT, FEW_LEVELS, FEW_POINTS, FINE, LEFT_OUT, TOO_FEW

Array = NDArray[Any]
Floats = NDArray[np.float64]

# Population values of the middle-80 % fit of a Gaussian's magnitudes; lambda is in units of sigma.
HALF_NORMAL_K = 1.205434
HALF_NORMAL_LAMBDA = 0.887487
HALF_NORMAL_R2 = 0.997740

TRIMS: dict[str, tuple[float, float]] = {
    "mid_80": (0.1, 0.9),
    "mid_90": (0.05, 0.95),
    "full_range": (0.0, 1.0),
}


@dataclass(frozen=True)
class WeibullFit:
    """A Weibull fit of magnitudes, or NaN with the ``reason`` why there is none.

    ``lam`` is in the weights' units. ``r2`` is that of the line on the probability plot, ``ks`` the
    largest distance between the empirical and the fitted distribution over all values. ``n`` counts
    the finite non-zero values, ``k_stderr`` is the standard error of k; ``zero_fraction`` is a share
    of all values. Fits of different ``method`` or ``trim`` do not compare. ``flags`` holds warnings.
    """

    k: float = nan
    lam: float = nan
    r2: float = nan
    ks: float = nan
    n: int = 0
    k_stderr: float = nan
    method: str = "exact"
    trim: str = "mid_80"
    reason: str = FINE
    zero_fraction: float = nan
    nonfinite_count: int = 0
    flags: tuple[str, ...] = ()

    @property
    def protocol(self) -> str:
        """Method and trim, as a run's settings name them."""
        return f"{self.method} {self.trim}"


def fit(values: Array | Histogram, method: str = "exact", trim: str = "mid_80") -> WeibullFit:
    """Fit the magnitudes of an array of floats of any shape, or of a `Histogram`.

    ``method`` is "exact" (order statistics, ties at their mid-rank) or "binned" (the protocol of
    npm-weibull-py 0.4.0: 1,024 bins of log10|w|, whose k moves by up to 0.003 with the scale).
    ``trim`` is the part of the plot that is fitted: "mid_80", "mid_90" or "full_range". What an array
    may hold, and how it is read, is said at `dynscope.weibull.count`; the binned fit of a histogram is
    as exact as its levels where it has no ``log_bins``.

    Raises `InputError` for another method or trim.
    """
    if method not in ("exact", "binned"):
        raise InputError(f"no Weibull method {method!r}: choose 'exact' or 'binned'", exit_code=2)
    window = _window(trim)
    histogram = values if isinstance(values, Histogram) else count_for(values, method, trim)
    sample = _sample(histogram, method, trim)
    if sample.reason:
        return sample
    return (
        _fit_exact(sample, histogram, window)
        if method == "exact"
        else _fit_binned(sample, histogram, window)
    )


def count_for(values: Array, method: str, trim: str) -> Histogram:
    """What a fit needs of an array: the ends of a distribution every magnitude, where they are fitted."""
    return count(values, method == "binned", every=trim == "full_range")


def difference(first: WeibullFit, second: WeibullFit) -> tuple[float, float]:
    """k of ``second`` minus k of ``first``, with its standard error for independent samples.

    Raises `InputError` when the methods differ: the protocols disagree by more than training does.
    """
    if not comparable(first.protocol, second.protocol):
        raise InputError(
            f"Weibull fits by different methods do not compare ({first.protocol!r} and "
            f"{second.protocol!r}): fit both by the same method",
        )
    return second.k - first.k, hypot(first.k_stderr, second.k_stderr)


def comparable(*protocols: str) -> bool:
    """Whether fits made by these methods (`WeibullFit.protocol`) may be put side by side."""
    return len(set(protocols)) <= 1


def _window(trim: str) -> tuple[float, float]:
    if trim not in TRIMS:
        raise InputError(f"no trim {trim!r}: choose one of {', '.join(TRIMS)}", exit_code=2)
    return TRIMS[trim]


def _sample(histogram: Histogram, method: str, trim: str) -> WeibullFit:
    """A fit with its counts, and the reason not to go on."""
    total, n = histogram.total, histogram.n
    reason = histogram.reason
    if not reason and n < 100:
        reason = TOO_FEW
    elif not reason and n < 0.1 * total:
        reason = LEFT_OUT
    elif not reason and len(histogram.levels) == 1:
        reason = CONSTANT
    return WeibullFit(
        n=n,
        method=method,
        trim=trim,
        reason=reason,
        zero_fraction=histogram.zeros / total if total else nan,
        nonfinite_count=histogram.nonfinite,
    )


def _fit_exact(sample: WeibullFit, histogram: Histogram, window: tuple[float, float]) -> WeibullFit:
    """The p of a magnitude is its mid-rank (without ties, ``(i - 0.5) / n``), and its weight the
    number of its ranks inside the window, so a tie that straddles the edge counts in part.
    """
    compiled, high = loops(), window[1]
    positions = _positions if compiled is None else compiled.positions
    ranks, start, p, weight = positions(histogram.counts, sample.n, *window)
    if len(p) < 5:
        return replace(sample, reason=FEW_POINTS)
    few = len(p) < min(100.0, weight.sum() * sample.n / 2)
    x, y = np.log(histogram.levels[start : start + len(p)]), _plotted(p)
    if x[-1] - x[0] < _CONSTANT:
        return replace(sample, reason=CONSTANT)
    if compiled is None:
        line = _line(x, y, weight)
        error = _standard_error(x, y, weight, line, 1 - high)
        ks = _distance(histogram, ranks, line)
    else:
        line = _Line(*compiled.line(x, y, weight))
        error = compiled.error(x, y, weight, line.k, 1 - high)
        ks = compiled.distance(histogram.levels, histogram.counts, ranks, line.k, line.lam)
    return replace(
        sample,
        k=line.k,
        lam=line.lam,
        r2=line.r2,
        ks=ks,
        k_stderr=error / sample.n**0.5,
        flags=(FEW_LEVELS,) if few else (),
    )


_CONSTANT = 0.01  # by which the logarithms differ at least over what is fitted: k below 300


def _positions(
    counts: NDArray[np.int64], n: int, low: float, high: float
) -> tuple[NDArray[np.int64], int, Floats, Floats]:
    """All ranks; the first level in the window, and from it on p and the share of the ranks inside."""
    ranks = np.cumsum(counts)
    start = int(np.searchsorted(ranks, low * n, "right"))
    stop = int(np.searchsorted(ranks, high * n)) + 1
    inside, counts = ranks[start:stop], counts[start:stop]
    weight = counts / n
    if len(weight):
        weight[0] = inside[0] / n - max(low, (inside[0] - counts[0]) / n)
        weight[-1] += min(0.0, high - inside[-1] / n)
    return ranks, start, (inside - counts / 2) / n, weight


def _plotted(p: Floats) -> Floats:
    """ln(-ln(1 - p)) in place, of ascending p; ``log`` is the faster one where it is exact enough."""
    small = int(np.searchsorted(p, 0.02))
    np.log1p(-p[:small], out=p[:small])
    np.subtract(1, p[small:], out=p[small:])
    np.log(p[small:], out=p[small:])
    np.negative(p, out=p)
    return np.log(p, out=p)


class _Line(NamedTuple):
    k: float
    lam: float
    r2: float


def _line(x: Floats, y: Floats, weight: Floats) -> _Line:
    """Weighted least squares of y on x, both of which are centred in place."""
    total = float(weight.sum())
    x_mean, y_mean = _dot(weight, x) / total, _dot(weight, y) / total
    x -= x_mean
    y -= y_mean
    weighted = weight * x
    xx, xy = _dot(weighted, x), _dot(weighted, y)
    yy = _dot(np.multiply(weight, y, out=weighted), y)
    k = xy / xx
    return _Line(k, exp(x_mean - y_mean / k), xy * xy / (xx * yy))


def _dot(one: Floats, other: Floats) -> float:
    """Not ``@``, for which BLAS brings threads of its own."""
    return float(np.einsum("i,i->", one, other))


def _standard_error(x: Floats, y: Floats, weight: Floats, line: _Line, above: float) -> float:
    """Standard error of k times the square root of n, for independent values of any distribution.

    To first order k moves by ``sum (y - 2 k x) dx / sum x^2`` (x, y centred) when the quantiles
    move by dx, and ``dx = -B(p) dx/dp / sqrt(n)`` with B a Brownian bridge. Integrating by parts
    gives the variance of ``G(p) = integral of (y - 2 k x) dx`` from the low edge to p, for uniform
    p: G is 0 below the fitted range and stays at its last value above it, where the share ``above``
    lies.
    """
    slope = y - 2 * line.k * x
    total = np.append(0, np.cumsum((slope[1:] + slope[:-1]) / 2 * np.diff(x)))
    first = (weight * total).sum() + above * total[-1]
    second = (weight * total**2).sum() + above * total[-1] ** 2
    return float(np.sqrt(max(second - first**2, 0.0)) / (weight * x * x).sum())


_BLOCK = 128  # levels that are looked at together first


def _distance(histogram: Histogram, ranks: NDArray[np.int64], line: _Line) -> float:
    """Largest distance of the two distributions, read at the edges of each magnitude's cell.

    A magnitude stands for what rounds to it (0.4 % to either side, at most half-way to the next),
    so that weights kept in bfloat16 or counted by bits do not look worse for having been rounded.
    Both distributions only rise, which bounds the distance within a block of levels by its ends:
    only blocks whose bound exceeds the largest distance found so far are looked into.
    """
    levels, n, last = histogram.levels, int(ranks[-1]), len(ranks) - 1
    starts = np.arange(0, len(levels), _BLOCK)
    ends = np.minimum(starts + _BLOCK - 1, last)
    below = (ranks[starts] - histogram.counts[starts]) / n
    at_start, at_end = _distribution(levels[starts], line), _distribution(levels[ends], line)
    bound = np.maximum(ranks[ends] / n - at_start, at_end - below)
    found = _largest(histogram, ranks, line, starts)
    inside = np.flatnonzero(bound > found)
    if len(inside):
        every = (starts[inside, None] + np.arange(_BLOCK)).reshape(-1)
        found = max(found, _largest(histogram, ranks, line, every[every <= last]))
    return found


def _largest(
    histogram: Histogram, ranks: NDArray[np.int64], line: _Line, at: NDArray[np.int64]
) -> float:
    levels, n, last = histogram.levels, int(ranks[-1]), len(ranks) - 1
    level = levels[at].astype(np.float64)
    after = np.where(at < last, levels[np.minimum(at + 1, last)], np.inf)
    before = np.where(at > 0, levels[np.maximum(at - 1, 0)], -level)
    end = np.minimum(level * (1 + 2**-8), (level + after) / 2)
    start = np.maximum(level * (1 - 2**-8), (level + before) / 2)
    above = ranks[at] / n - _distribution(end, line)
    below = _distribution(start, line) - (ranks[at] - histogram.counts[at]) / n
    return float(np.maximum(np.abs(above), np.abs(below)).max())


def _distribution(x: Floats, line: _Line) -> Floats:
    with np.errstate(over="ignore"):
        values: Floats = -np.expm1(-((x / line.lam) ** line.k))
    return values


def _fit_binned(
    sample: WeibullFit, histogram: Histogram, window: tuple[float, float]
) -> WeibullFit:
    """The protocol as npm-weibull-py 0.4.0 codes it; it counts values from 1e-12 to 1e2 only."""
    low, high = window
    bins = histogram.log_bins
    if bins is None:
        bins = log_bins(histogram.levels, histogram.counts)
    if bins.sum() < 100:
        return replace(sample, reason=TOO_FEW)
    upper = np.cumsum(bins) / bins.sum()
    middle = upper - bins / bins.sum() / 2
    used = (bins > 0) & (middle >= low) & (middle <= high)
    if used.sum() < 5:
        return replace(sample, reason=FEW_POINTS)
    centres = (LOG_EDGES[:-1] + LOG_EDGES[1:]) / 2 * log(10)
    x, y = centres[used], np.log(-np.log(1 - middle[used] + 1e-12))
    weight = bins[used] / bins.sum()
    line = _line(x, y, weight)
    ks = float(np.abs(upper - _distribution(np.exp(centres), line)).max())
    error = _standard_error(x, y, weight, line, 1 - high) / sample.n**0.5
    return replace(sample, k=line.k, lam=line.lam, r2=line.r2, ks=ks, k_stderr=error)
