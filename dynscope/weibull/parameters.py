"""From what a training process counted of its parameters to the metrics ``weight/*``."""

from collections.abc import Mapping
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynscope.weibull.fits import WeibullFit, fit
from dynscope.weibull.histogram import Histogram
from dynscope.weibull.reasons import REASONS

Array = NDArray[Any]


def derive(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Turn what `dynscope.hooks.weights.collect` took (its docstring lists it) into ``weight/*``.

    Every result has one entry per parameter. Norm, rms, absmax and mean are over finite values;
    ``weight/weibull_reason`` indexes `REASONS`. A parameter that holds no values is NaN.
    """
    fits = [_fit_parameter(arrays, index) for index in range(len(arrays["numel"]))]
    rows = np.array([fit_row(one) for one in fits], np.float64).reshape(len(fits), len(FIT_METRICS))
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
)
"""The metrics that a fit fills, in the order of `fit_row`."""


def fit_row(one: WeibullFit) -> tuple[float, ...]:
    fitted = (one.k, one.lam, one.r2, one.ks, one.n, one.k_stderr)
    return (*fitted, one.zero_fraction, one.nonfinite_count)


def _fit_parameter(arrays: Mapping[str, Array], index: int) -> WeibullFit:
    part = slice(arrays["offsets"][index], arrays["offsets"][index + 1])
    reason = REASONS[int(arrays["reason"][index])]
    found = fit(Histogram.of_counts(arrays["values"][part], arrays["counts"][part]))
    if reason:
        return replace(WeibullFit(), reason=reason, n=found.n, zero_fraction=found.zero_fraction,
                       nonfinite_count=found.nonfinite_count)  # fmt: skip
    return found
