"""From what a training process counted of its parameters to the metrics ``weight/*``."""

from collections.abc import Mapping
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynscope.weibull.fits import WeibullFit, fit
from dynscope.weibull.histogram import Histogram
from dynscope.weibull.ratios import Ratios, ratios
from dynscope.weibull.reasons import NOT_A_MATRIX, REASONS

Array = NDArray[Any]


def derive(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Turn what `dynscope.hooks.training.weights.collect` took (its docstring lists it) into ``weight/*``.

    Every result has one entry per parameter. Norm, rms, absmax and mean are over finite values;
    ``weight/weibull_reason`` indexes `REASONS`. A parameter that holds no values is NaN.
    """
    counted = [_counted(arrays, index) for index in range(len(arrays["numel"]))]
    reasons = [REASONS[int(reason)] for reason in arrays["reason"]]
    fits = [fit_or_reason(*each) for each in zip(counted, reasons, strict=True)]
    rows = np.array([fit_row(*each) for each in zip(fits, counted, strict=True)], np.float64)
    rows = rows.reshape(len(fits), len(FIT_METRICS))
    derived: dict[str, Array] = dict(zip(FIT_METRICS, rows.T, strict=True))
    derived["weight/weibull_reason"] = np.array([REASONS.index(one.reason) for one in fits])
    finite = arrays["numel"] - derived["weight/nonfinite_count"]
    held = np.where(finite > 0, finite, nan)
    derived["weight/mean"] = arrays["sum"] / held
    derived["weight/rms"] = np.sqrt(arrays["sum_squares"] / held)
    derived["weight/norm"] = derived["weight/rms"] * np.sqrt(held)
    derived["weight/absmax"] = np.where(finite > 0, arrays["absmax"], nan)
    return derived


FIT_METRICS = (
    "weight/weibull_k",
    "weight/weibull_lambda",
    "weight/weibull_r2",
    "weight/weibull_ks",
    "weight/weibull_n",
    "weight/weibull_k_standard_error",
    "weight/zero_fraction",
    "weight/nonfinite_count",
    "weight/q90_q10",
    "weight/q99_q50",
    "weight/q999_q50",
    "weight/gini",
)
"""The metrics that follow from a fit and a histogram, in the order of `fit_row`."""


def fit_row(one: WeibullFit, histogram: Histogram) -> tuple[float, ...]:
    """The numbers of a parameter; without ratios where it was never meant to be fitted."""
    fitted = (one.k, one.lam, one.r2, one.ks, one.n, one.k_stderr)
    spread = Ratios() if one.reason == NOT_A_MATRIX else ratios(histogram)
    return (*fitted, one.zero_fraction, one.nonfinite_count, *spread)


def fit_or_reason(
    histogram: Histogram, reason: str, method: str = "exact", trim: str = "mid_80"
) -> WeibullFit:
    """The fit, or with a ``reason`` not to fit only the counts."""
    found = fit(histogram, method, trim)
    if not reason:
        return found
    counts = {name: getattr(found, name) for name in ("n", "zero_fraction", "nonfinite_count")}
    return WeibullFit(method=method, trim=trim, reason=reason, **counts)


def _counted(arrays: Mapping[str, Array], index: int) -> Histogram:
    part = slice(arrays["offsets"][index], arrays["offsets"][index + 1])
    return Histogram.of_counts(arrays["values"][part], arrays["counts"][part])
