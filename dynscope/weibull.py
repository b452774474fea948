"""Weibull fits of weight magnitudes: the probability plot, its goodness and its standard error.

The model is ``F(x) = 1 - exp(-(x / lambda)^k)`` with its location fixed at zero. On a Weibull plot,
``y = ln(-ln(1 - F))`` against ``x = ln|w|``, it is a line of slope k; the middle 80 % is fitted.
Source: Weibull weight magnitudes, arXiv 2605.18898. How to read it: docs/weibull.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, hypot, log, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynscope.errors import InputError

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

FINE = ""
NOT_A_MATRIX = "a bias or a gain, not a matrix"
QUANTISED = "stored as integers, quantised or complex"
WRAPPED = "sharded or held by a tensor subclass"
SPARSE = "sparse or packed layout"
NO_VALUES = "no values yet (meta device or lazy)"
TOO_FEW = "fewer than 100 finite non-zero values"
LEFT_OUT = "more than 90 % of the values are zero or not finite"
CONSTANT = "all magnitudes are equal"
FEW_POINTS = "fewer than 5 distinct magnitudes in the fitted range"

REASONS = (
    FINE, NOT_A_MATRIX, QUANTISED, WRAPPED, SPARSE,
    NO_VALUES, TOO_FEW, LEFT_OUT, CONSTANT, FEW_POINTS,
)  # fmt: skip
"""Why there is no fit; ``weight/weibull_reason`` is an index into this tuple, 0 for a good fit."""

FEW_LEVELS = "few distinct levels"


@dataclass(frozen=True)
class Fit:
    """A Weibull fit of magnitudes, or NaN with the ``reason`` why there is none.

    ``lambda_`` is in the weights' units. ``r2`` is that of the line on the Weibull plot, ``ks`` the
    largest distance between the empirical and the fitted distribution over all values. ``n`` counts
    the finite non-zero values; ``zero_fraction`` is a share of all values. ``method`` names the
    protocol and the trim: fits of different methods do not compare. ``flags`` holds warnings.
    """

    k: float = nan
    lambda_: float = nan
    r2: float = nan
    ks: float = nan
    n: int = 0
    zero_fraction: float = nan
    nonfinite_count: int = 0
    k_standard_error: float = nan
    method: str = "exact mid_80"
    reason: str = FINE
    flags: tuple[str, ...] = ()


def fit(values: Array, method: str = "exact", trim: str = "mid_80") -> Fit:
    """Fit the magnitudes of an array of floats, of any shape.

    ``method`` is "exact" (order statistics, ties at their mid-rank) or "binned" (the protocol of
    npm-weibull-py 0.4.0: 1,024 bins of log10|w|, whose k moves by up to 0.003 with the scale).
    Raises `InputError` for another method or trim. Integers are never fitted as if they were
    weights.
    """
    if method not in ("exact", "binned"):
        raise InputError(f"no Weibull method {method!r}: choose 'exact' or 'binned'", exit_code=2)
    values = np.asarray(values)
    if values.dtype.kind != "f":
        _window(trim)
        return Fit(method=f"{method} {trim}", reason=QUANTISED)
    magnitudes, counts = np.unique(np.abs(values), return_counts=True)
    if method == "exact":
        return fit_counts(magnitudes, counts, trim)
    return _fit_binned(magnitudes, counts, trim)


def fit_counts(values: Array, counts: Array, trim: str = "mid_80") -> Fit:
    """Fit magnitudes with multiplicities: value ``values[i]`` occurs ``counts[i]`` times.

    The p of a value is its mid-rank (without ties, ``(i - 0.5) / n``) and its weight the number of
    its ranks inside the trimmed range, so a tie that straddles the edge counts in part.
    """
    low, high = _window(trim)
    sample, levels, sizes = _sample(values, counts, f"exact {trim}")
    if sample.reason:
        return sample
    upper = np.cumsum(sizes) / sample.n
    lower = upper - sizes / sample.n
    weight = np.clip(upper, low, high) - np.clip(lower, low, high)
    used = weight > 0
    if used.sum() < 5:
        return replace(sample, reason=FEW_POINTS)
    x, weight = np.log(levels[used]), weight[used]
    y = np.log(-np.log1p(-(upper + lower)[used] / 2))
    line = _line(x, y, weight)
    few = used.sum() < min(100.0, weight.sum() * sample.n / 2)
    return replace(
        sample,
        k=line.k,
        lambda_=line.lambda_,
        r2=line.r2,
        ks=_distance(levels, lower, upper, line),
        k_standard_error=_standard_error(x, y, weight, line, 1 - high) / sample.n**0.5,
        flags=(FEW_LEVELS,) if few else (),
    )


def difference(first: Fit, second: Fit) -> tuple[float, float]:
    """k of ``second`` minus k of ``first``, with its standard error for independent samples.

    Raises `InputError` when the methods differ: the protocols disagree by more than training does.
    """
    if not comparable(first.method, second.method):
        raise InputError(
            f"Weibull fits by different methods do not compare ({first.method!r} and "
            f"{second.method!r}): fit both by the same method",
        )
    return second.k - first.k, hypot(first.k_standard_error, second.k_standard_error)


def comparable(*methods: str) -> bool:
    """Whether fits made by these methods (`Fit.method`) may be put side by side."""
    return len(set(methods)) <= 1


def derive(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Turn what `dynscope.hooks.weights.collect` took (its docstring lists it) into ``weight/*``.

    Every result has one entry per parameter. Norm, rms, absmax and mean are over finite values;
    ``weight/weibull_reason`` indexes `REASONS`. A parameter that holds no values is NaN.
    """
    fits = [_fit_parameter(arrays, index) for index in range(len(arrays["numel"]))]
    rows = np.array([_row(one) for one in fits], np.float64).reshape(len(fits), len(_COLUMNS))
    derived: dict[str, Array] = dict(zip(_COLUMNS, rows.T, strict=True))
    finite = arrays["numel"] - derived["weight/nonfinite_count"]
    held = np.where(finite > 0, finite, nan)
    derived["weight/mean"] = arrays["sum"] / held
    derived["weight/rms"] = np.sqrt(arrays["sum_squares"] / held)
    derived["weight/norm"] = derived["weight/rms"] * np.sqrt(held)
    derived["weight/absmax"] = np.where(finite > 0, arrays["absmax"], nan)
    return derived


_COLUMNS = (
    "weight/weibull_k",
    "weight/weibull_lambda",
    "weight/weibull_r2",
    "weight/weibull_ks",
    "weight/weibull_n",
    "weight/weibull_k_standard_error",
    "weight/weibull_reason",
    "weight/zero_fraction",
    "weight/nonfinite_count",
)


def _row(one: Fit) -> tuple[float, ...]:
    reason = REASONS.index(one.reason)
    fitted = (one.k, one.lambda_, one.r2, one.ks, one.n, one.k_standard_error, reason)
    return (*fitted, one.zero_fraction, one.nonfinite_count)


def _fit_parameter(arrays: Mapping[str, Array], index: int) -> Fit:
    part = slice(arrays["offsets"][index], arrays["offsets"][index + 1])
    values, counts = arrays["values"][part], arrays["counts"][part]
    refused = REASONS[int(arrays["reason"][index])]
    if refused:
        return replace(_sample(values, counts, Fit.method)[0], reason=refused)
    return fit_counts(values, counts)


class _Line(NamedTuple):
    k: float
    lambda_: float
    r2: float


def _line(x: Floats, y: Floats, weight: Floats) -> _Line:
    """Weighted least squares of y on x."""
    x_mean, y_mean = np.average(x, weights=weight), np.average(y, weights=weight)
    x, y = x - x_mean, y - y_mean
    k = float((weight * x * y).sum() / (weight * x * x).sum())
    r2 = 1 - float((weight * (y - k * x) ** 2).sum() / (weight * y * y).sum())
    return _Line(k, exp(x_mean - y_mean / k), r2)


def _standard_error(x: Floats, y: Floats, weight: Floats, line: _Line, above: float) -> float:
    """Standard error of k times the square root of n, for independent values of any distribution.

    To first order k moves by ``sum (y - 2 k x) dx / sum x^2`` (x, y centred) when the quantiles
    move by dx, and ``dx = -B(p) dx/dp / sqrt(n)`` with B a Brownian bridge. Integrating by parts
    gives the variance of ``G(p) = integral of (y - 2 k x) dx`` from the low edge to p, for uniform
    p: G is 0 below the fitted range and stays at its last value above it, where the share ``above``
    lies.
    """
    x, y = x - np.average(x, weights=weight), y - np.average(y, weights=weight)
    slope = y - 2 * line.k * x
    total = np.append(0, np.cumsum((slope[1:] + slope[:-1]) / 2 * np.diff(x)))
    first = (weight * total).sum() + above * total[-1]
    second = (weight * total**2).sum() + above * total[-1] ** 2
    return float(np.sqrt(max(second - first**2, 0.0)) / (weight * x * x).sum())


def _distance(levels: Floats, lower: Floats, upper: Floats, line: _Line) -> float:
    """Largest distance of the two distributions, read at the edges of each magnitude's cell.

    A magnitude stands for what rounds to it (0.4 % to either side, at most half-way to the next),
    so that weights kept in bfloat16 or counted by bits do not look worse for having been rounded.
    """
    halfway = (levels[1:] + levels[:-1]) / 2
    ends = np.minimum(levels * (1 + 2**-8), np.append(halfway, np.inf))
    starts = np.maximum(levels * (1 - 2**-8), np.append(0, halfway))
    above, below = upper - _distribution(ends, line), _distribution(starts, line) - lower
    return float(np.maximum(np.abs(above), np.abs(below)).max())


def _distribution(x: Floats, line: _Line) -> Floats:
    values: Floats = -np.expm1(-((x / line.lambda_) ** line.k))
    return values


def _fit_binned(magnitudes: Array, counts: Array, trim: str) -> Fit:
    """The protocol as npm-weibull-py 0.4.0 codes it; it counts values from 1e-12 to 1e2 only."""
    low, high = _window(trim)
    sample, levels, sizes = _sample(magnitudes, counts, f"binned {trim}")
    if sample.reason:
        return sample
    # Its logarithm is taken in float32, which decides on which side of an edge a value falls.
    bins, edges = np.histogram(
        np.log10(levels.astype(np.float32)), np.linspace(-12.0, 2.0, 1025), weights=sizes
    )
    if bins.sum() < 100:
        return replace(sample, reason=TOO_FEW)
    upper = np.cumsum(bins) / bins.sum()
    middle = upper - bins / bins.sum() / 2
    used = (bins > 0) & (middle >= low) & (middle <= high)
    if used.sum() < 5:
        return replace(sample, reason=FEW_POINTS)
    x = (edges[:-1] + edges[1:]) / 2 * log(10)
    line = _line(x[used], np.log(-np.log(1 - middle[used] + 1e-12)), bins[used])
    ks = float(np.abs(upper - _distribution(np.exp(x), line)).max())
    return replace(sample, k=line.k, lambda_=line.lambda_, r2=line.r2, ks=ks)


def _window(trim: str) -> tuple[float, float]:
    if trim not in TRIMS:
        raise InputError(f"no trim {trim!r}: choose one of {', '.join(TRIMS)}", exit_code=2)
    return TRIMS[trim]


def _sample(values: Array, counts: Array, method: str) -> tuple[Fit, Floats, Floats]:
    """A fit with its counts and the reason not to go on, and the usable magnitudes, ascending."""
    levels, sizes = np.asarray(values, np.float64), np.asarray(counts, np.float64)
    if not (levels[1:] > levels[:-1]).all():
        levels, place = np.unique(levels, return_inverse=True)
        sizes = np.bincount(place, weights=sizes).astype(np.float64)
    total, finite = sizes.sum(), np.isfinite(levels)
    usable = finite & (levels > 0)
    left = sizes[usable].sum()
    reason = FINE
    if left < 100:
        reason = TOO_FEW
    elif left < 0.1 * total:
        reason = LEFT_OUT
    elif usable.sum() == 1:
        reason = CONSTANT
    sample = Fit(
        n=int(left),
        zero_fraction=float(sizes[levels == 0].sum() / total) if total else nan,
        nonfinite_count=int(sizes[~finite].sum()),
        method=method,
        reason=reason,
    )
    return sample, levels[usable], sizes[usable]
