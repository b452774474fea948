"""What a page draws, as plain arrays: curves over depth and step, lines over the training.

Made from a run, before and without any figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dynscope.analysis.depth import GrowthLaw, growth_law
from dynscope.catalogue import Metric
from dynscope.reports.numbers.curves import Curve
from dynscope.reports.numbers.measured import Floats, Measured, Steps, same
from dynscope.reports.numbers.thinning import thin_line

# Quantities that are read on a straight axis: shares, angles, signed values, shapes of a fit.
LINEAR = {
    "mean", "kurtosis", "angular_distance", "cosine_to_input", "zero_fraction",
    "fp16_overflow_fraction", "channel_mean_energy", "n_calls", "count", "nonfinite_count",
    "massive_count", "branch_ratio", "weibull_k", "weibull_r2", "weibull_ks",
}  # fmt: skip
LAWFUL = {
    "activation/variance", "activation/rms", "activation/absmax", "activation/mean_abs",
    "activation/median_abs", "activation_gradient/rms", "activation_gradient/norm",
    "activation_gradient/absmax",
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One curve over depth at every drawn step: ``values`` is (steps, depths)."""

    curve: Curve
    values: Floats


@dataclass(frozen=True)
class Laws:
    """The growth law of a profile's leading curve at every drawn step, drawn as (steps, depths).

    Where no law fits what is drawn is the jump, if there is one: the values on both sides of it.
    """

    depths: Steps
    values: Floats
    laws: tuple[GrowthLaw, ...]


@dataclass(frozen=True)
class Profile:
    """A metric over depth and step, thinned for drawing."""

    metric: Metric
    steps: Steps
    series: tuple[Series, ...]
    laws: Laws | None = None

    @property
    def plain(self) -> tuple[Series, ...]:
        """The series that are seen at first: matrices, or vectors where there is nothing else."""
        return tuple(one for one in self.series if not one.curve.minor) or self.series

    @property
    def log(self) -> bool:
        return self.metric.short not in LINEAR and self.spans_zero is False

    @property
    def spans_zero(self) -> bool:
        """Whether any value is negative, or none is positive: no logarithm then."""
        lows = [np.nanmin(one.values) for one in self.series if np.isfinite(one.values).any()]
        highs = [np.nanmax(one.values) for one in self.series if np.isfinite(one.values).any()]
        return bool(not lows or min(lows) < 0 or max(highs) <= 0)

    @property
    def constant(self) -> float | None:
        """The one value that every cell has, if they all do."""
        finite = [one.values[np.isfinite(one.values)] for one in self.series]
        seen = {float(one) for part in finite for one in np.unique(part)[:2]}
        return seen.pop() if len(seen) == 1 else None


@dataclass(frozen=True)
class Line:
    """A quantity over the training, thinned for drawing."""

    name: str
    steps: Steps
    values: Floats

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Where there is something to draw."""
        return np.asarray(np.isfinite(self.values))


@dataclass(frozen=True)
class Massive:
    """The three largest elements of each block's output: arrays (steps, depths, 3)."""

    curve: Curve
    steps: Steps
    magnitude: Floats
    channel: Floats
    token: Floats
    median: Floats | None


def profile(measured: Measured, metric: Metric) -> Profile:
    """A metric over depth at the drawn steps; curves that hold no number are left out."""
    rows = measured.rows(metric)
    taken = measured.array(metric.name)[rows.rows]
    every = [Series(curve, curve.values(taken)) for curve in measured.curves(metric)]
    series = tuple(one for one in every if np.isfinite(one.values).any())
    return Profile(metric, rows.drawn, series, _laws(metric, series))


def without_twins(measured: Measured, found: Profile) -> Profile:
    """``found`` without the sublayers whose outputs, and values here, are the block's own."""
    twins = {curve.key for curve in measured.twins}
    stream = next((one for one in found.series if one.curve.role == "block"), None)
    if not twins or stream is None:
        return found
    kept = [
        one for one in found.series
        if one.curve.key not in twins
        or not same(one.values, stream.values)
    ]  # fmt: skip
    return replace(found, series=tuple(kept))


def massive(measured: Measured) -> Massive | None:
    """The top three of the residual stream (or of all layers), None where none was recorded."""
    curve = measured.stream
    if curve is None or not measured.has("massive/value"):
        return None
    rows = measured.drawn

    def taken(name: str) -> Floats:
        return curve.values(measured.array(name)[rows.rows])

    magnitude = np.abs(taken("massive/value"))
    if np.isnan(magnitude).all():
        return None
    has_median = measured.has("activation/median_abs")
    return Massive(
        curve,
        rows.drawn,
        magnitude,
        taken("massive/channel").astype(np.float32),
        taken("massive/token").astype(np.float32),
        taken("activation/median_abs") if has_median else None,
    )


def line(name: str, steps: Steps, values: Floats) -> Line:
    """A line over the training, with few enough points to draw."""
    rows = thin_line(values)
    return Line(name, steps[rows], values[rows])


def _laws(metric: Metric, series: Sequence[Series]) -> Laws | None:
    if metric.name not in LAWFUL or not series or not series[0].curve.joined:
        return None
    depths = series[0].curve.depths
    laws = tuple(growth_law(depths, row) for row in series[0].values)
    if all(law.kind == "none" and law.jump is None for law in laws):
        return None
    drawn = [_drawn(law, depths, row) for law, row in zip(laws, series[0].values, strict=True)]
    return Laws(depths, np.stack(drawn), laws)


def _drawn(law: GrowthLaw, depths: Steps, values: Floats) -> Floats:
    if law.jump is None or not law.jump.steep:
        return law.at(depths)
    sides = np.flatnonzero((values > 0) & (depths <= law.jump.depth))[-2:]
    drawn = np.full(len(depths), np.nan)
    drawn[sides] = values[sides]
    return drawn
