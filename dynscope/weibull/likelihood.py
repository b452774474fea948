"""The maximum-likelihood fit, for comparison with the probability plot."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from dynscope.weibull.fits import WeibullFit, fit
from dynscope.weibull.histogram import Histogram, count

Floats = NDArray[np.float64]


def maximum_likelihood(values: NDArray[Any] | Histogram) -> WeibullFit:
    """Fit all magnitudes by maximum likelihood, the location fixed at zero.

    ``method`` is "likelihood", ``trim`` "full_range"; ``r2`` is NaN, as there is no line. The
    standard error is the sandwich one, which holds for weights that are not Weibull too: then k is
    that of the nearest Weibull distribution (White, Econometrica 50, 1982). It is unlike the
    plot's k wherever weights are not Weibull: 1.2628 for Gaussian ones, where the plot's is 1.2054.
    """
    histogram = values if isinstance(values, Histogram) else count(values)
    plot = fit(histogram, trim="full_range")
    empty = replace(plot, method="likelihood", r2=np.nan, flags=())
    if plot.reason:
        return empty
    top = histogram.levels[-1]
    logs, shares = np.log(histogram.levels / top), histogram.counts / plot.n
    k = _root(logs, shares)
    z = np.exp(k * logs)
    scale = float(shares @ z)
    lam = float(top) * scale ** (1 / k)
    share_below = np.cumsum(shares)
    fitted = -np.expm1(-z / scale)
    ks = max(np.abs(share_below - fitted).max(), np.abs(share_below - shares - fitted).max())
    error = _sandwich(k, logs - np.log(scale) / k, z / scale, shares) / plot.n**0.5
    return replace(empty, k=k, lam=lam, ks=float(ks), k_stderr=error)


def _root(logs: Floats, shares: Floats) -> float:
    """The k at which the derivative of the profile likelihood vanishes; it falls with k."""
    mean = float(shares @ logs)

    def slope(k: float) -> float:
        z = shares * np.exp(k * logs)
        return float(z @ logs / z.sum()) - mean - 1 / k

    low = high = 1.0
    while slope(low) > 0:
        low /= 2
    while slope(high) < 0:
        high *= 2
    return float(brentq(slope, low, high, xtol=1e-13, rtol=1e-13))


def _sandwich(k: float, u: Floats, z: Floats, shares: Floats) -> float:
    """Standard error of k times the square root of n; u = ln(x / lam) and z = (x / lam)^k."""
    score = np.stack([1 / k + u - z * u, k * (z - 1)])
    spread = (score * shares) @ score.T
    cross = float(shares @ (z - 1 + k * z * u))
    curvature = np.array(
        [[-1 / k**2 - shares @ (z * u * u), cross], [cross, -(k**2) * (shares @ z)]]
    )
    inverse = np.linalg.inv(curvature)
    return float(np.sqrt((inverse @ spread @ inverse)[0, 0]))
