"""Weibull fits of weight magnitudes, from arrays or from counts of them. Torch is not needed.

The model is ``F(x) = 1 - exp(-(x / lam)^k)`` with its location fixed at zero.
Source: Weibull weight magnitudes, arXiv 2605.18898. How to read it: docs/weibull.md.
"""

from dynscope.weibull.fits import (
    HALF_NORMAL_K,
    HALF_NORMAL_LAMBDA,
    HALF_NORMAL_R2,
    TRIMS,
    WeibullFit,
    comparable,
    difference,
    fit,
)
from dynscope.weibull.histogram import Histogram, count
from dynscope.weibull.likelihood import maximum_likelihood
from dynscope.weibull.parameters import derive
from dynscope.weibull.ratios import Ratios, ratios
from dynscope.weibull.reasons import (
    CONSTANT,
    FEW_LEVELS,
    FEW_POINTS,
    FINE,
    LEFT_OUT,
    NO_VALUES,
    NOT_A_MATRIX,
    QUANTISED,
    REASONS,
    SPARSE,
    TOO_FEW,
    WRAPPED,
)

__all__ = [
    "CONSTANT", "FEW_LEVELS", "FEW_POINTS", "FINE", "HALF_NORMAL_K", "HALF_NORMAL_LAMBDA",
    "HALF_NORMAL_R2", "LEFT_OUT", "NOT_A_MATRIX", "NO_VALUES", "QUANTISED", "REASONS", "SPARSE",
    "TOO_FEW", "TRIMS", "WRAPPED", "Histogram", "Ratios", "WeibullFit", "comparable", "count",
    "derive", "difference", "fit", "maximum_likelihood", "ratios",
]  # fmt: skip
