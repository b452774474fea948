"""Ratios of quantiles, for weights that are not Weibull at all."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynscope.weibull.histogram import Histogram, count

NAN = float("nan")


class Ratios(NamedTuple):
    """How the magnitudes of weights are spread, whatever their distribution and scale.

    ``q90_q10`` tells the middle (half-normal: 13.09, exponential: 21.85, uniform: 9), ``q99_q50``
    and ``q999_q50`` the tail (half-normal: 3.819 and 4.879), ``gini`` how unequal they are, from 0
    (all alike) to 1 (half-normal: 0.4142). Source: the fallback of arXiv 2605.18898.
    """

    q90_q10: float = NAN
    q99_q50: float = NAN
    q999_q50: float = NAN
    gini: float = NAN


def ratios(values: NDArray[Any] | Histogram) -> Ratios:
    """The ratios of the finite non-zero magnitudes; NaN where there are fewer than 100.

    A quantile lies on the straight line between the two order statistics beside it, as in
    `numpy.quantile`; it is known to 0.02 % where wide floats were counted in buckets, to 0.2 % in a condensed histogram.
    """
    histogram = values if isinstance(values, Histogram) else count(values)
    n = histogram.n
    if n < 100:
        return Ratios()
    ranks = np.cumsum(histogram.counts)
    q10, q50, q90, q99, q999 = (
        _quantile(histogram.levels, ranks, p) for p in (0.1, 0.5, 0.9, 0.99, 0.999)
    )
    # Sum of (2 i - n - 1) x over ranks i; a magnitude that occurs c times up to rank r has c of them.
    counts = histogram.counts.astype(np.float64)
    weighted = counts * (2 * ranks - histogram.counts - n) * histogram.levels
    gini = float(weighted.sum() / (n * (counts @ histogram.levels)))
    return Ratios(q90 / q10, q99 / q50, q999 / q50, gini)


def _quantile(levels: NDArray[np.float64], ranks: NDArray[np.int64], p: float) -> float:
    place = p * (int(ranks[-1]) - 1)
    below = int(place)
    first, second = levels[
        np.searchsorted(ranks, [below, below + 1], "right").clip(0, len(levels) - 1)
    ]
    return float(first + (place - below) * (second - first))
