"""Depth summaries: what a curve over the blocks does, in numbers and in one sentence.

Computed from a run whenever asked, never stored. Every function takes ``depths`` (block indices
from 0) and ``values`` (NaN where nothing was recorded) of equal length, and answers NaN, None or kind
"none" where there is too little to say. Laws count blocks from one: the first block is l = 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, nan
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_FEWEST = 4  # blocks below which two coefficients and a goodness mean nothing
_FLAT = 1.1  # largest over smallest value that still counts as flat
_CLEAR = 0.81  # R squared of a law: one step between two flat levels, no law, reaches 3/4 to 4/5
_STEEP = 2.0  # factor between neighbouring blocks that is called a jump


@dataclass(frozen=True)
class DepthSlope:
    """Slopes of log value on l (``per_block``) and on log l (``exponent``), each with its R2."""

    per_block: float
    per_block_r2: float
    exponent: float
    exponent_r2: float


class Jump(NamedTuple):
    """The largest step between neighbouring blocks: ``factor`` times the block before ``depth``."""

    depth: int
    factor: float

    @property
    def steep(self) -> bool:
        """Whether it at least doubles or halves."""
        return self.fold >= _STEEP

    @property
    def fold(self) -> float:
        """How many times larger or smaller, from 1 up."""
        return max(self.factor, 1 / self.factor)

    @property
    def text(self) -> str:
        fold = f"{self.fold:,.0f}" if self.fold >= 100 else f"{self.fold:.2g}"
        if not self.steep:
            return f"no clear trend with depth (largest step {fold}-fold, at block {self.depth})"
        verb = "jumps" if self.factor > 1 else "drops"
        return f"{verb} {fold}-fold at block {self.depth} (no law fits)"


@dataclass(frozen=True)
class GrowthLaw:
    """How a positive quantity changes over the blocks l = 1, 2, ...

    ``kind`` and ``slope``: "linear", value = start + slope l; "power", start l^slope; "exponential",
    start exp(slope l); "flat", within 10 % of each other (slope 0); "none", no law fits or too
    few blocks (NaN). ``r2`` is always that of log value, so that the kinds compare. ``left_out`` are
    the blocks that were left out on purpose. ``jump`` says what happens where no law fits.
    """

    kind: str
    slope: float = nan
    start: float = nan
    r2: float = nan
    text: str = ""
    left_out: tuple[int, ...] = ()
    jump: Jump | None = None

    def at(self, depths: ArrayLike) -> Floats:
        """The law's values at block indices counted from 0; NaN for kind "none"."""
        place = np.asarray(depths, np.float64) + 1
        if self.kind == "power":
            return np.asarray(self.start * place**self.slope)
        if self.kind == "exponential":
            return np.asarray(self.start * np.exp(self.slope * place))
        return np.asarray(self.start + self.slope * place)


class Uniformity(NamedTuple):
    """Population standard deviation over mean, and largest over smallest, of the blocks' values."""

    cv: float
    max_over_min: float


class Place(NamedTuple):
    """A step and a block."""

    step: int
    depth: int


def depth_slope(depths: ArrayLike, values: ArrayLike) -> DepthSlope:
    """Least squares of log value on depth and on log depth; NaN below 4 positive finite values."""
    place, value = _positive(depths, values)
    if len(place) < _FEWEST:
        return DepthSlope(nan, nan, nan, nan)
    logs = np.log(value)
    per_block, start = _line(place, logs)
    exponent, power_start = _line(np.log(place), logs)
    return DepthSlope(
        per_block=per_block,
        per_block_r2=_r2(logs, start + per_block * place),
        exponent=exponent,
        exponent_r2=_r2(logs, power_start + exponent * np.log(place)),
    )


def growth_law(depths: ArrayLike, values: ArrayLike, leave_out: Sequence[int] = ()) -> GrowthLaw:
    """The law that explains log value best: linear, power or exponential growth (or decay).

    None is named below an R2 of 0.81, nor where two flat levels with a jump between explain more.

    The straight line is fitted by relative error (weights 1 / value^2), since all three are judged
    by the R2 of log value. ``leave_out`` names blocks that are outliers by construction; the text
    names them too.
    """
    left_out = tuple(int(depth) for depth in np.intersect1d(leave_out, depths))
    kept = ~np.isin(depths, left_out)
    place, value = _positive(np.asarray(depths)[kept], np.asarray(values)[kept])
    without = f", without block {', '.join(map(str, left_out))}" if left_out else ""
    if len(place) < _FEWEST:
        return GrowthLaw("none", text=f"too few blocks for a law{without}", left_out=left_out)
    if value.max() <= _FLAT * value.min():
        change = value.max() / value.min() - 1
        text = f"flat over depth (within {change:.1%}){without}"
        return GrowthLaw("flat", 0.0, float(value.mean()), text=text, left_out=left_out)
    law = max(_laws(place, value), key=lambda one: round(one.r2, 3))
    jump = _jump(place, value)
    levels = jump.steep and _levels_r2(place, value, jump) > law.r2
    if levels or not law.r2 >= _CLEAR:
        text = f"{jump.text}{without}"
        return GrowthLaw("none", r2=law.r2, text=text, left_out=left_out, jump=jump)
    text = f"{_sentence(law)} (R2 {law.r2:.2f}){without}"
    return GrowthLaw(law.kind, law.slope, law.start, law.r2, text, left_out)


def growth_ratio(depths: ArrayLike, values: ArrayLike) -> float:
    """Value of the last block over that of the first, among the finite ones."""
    _, value = _finite(depths, values)
    return float(value[-1] / value[0]) if len(value) > 1 and value[0] != 0 else nan


def uniformity(values: ArrayLike) -> Uniformity:
    """How alike the blocks are; ``max_over_min`` is NaN unless all finite values are positive."""
    value = np.asarray(values, np.float64)
    value = value[np.isfinite(value)]
    if not value.size:
        return Uniformity(nan, nan)
    mean, low = float(value.mean()), float(value.min())
    return Uniformity(
        cv=float(value.std() / abs(mean)) if mean else nan,
        max_over_min=float(value.max() / low) if low > 0 else nan,
    )


def first_bad_layer(
    steps: ArrayLike, depths: ArrayLike, bad: ArrayLike, backward: bool = False
) -> Place | None:
    """The first step with a bad block, and there the block that produced it.

    ``bad`` is (steps, depths): true, or a count above zero, where something is wrong; NaN is not
    recorded, hence not bad. What follows the producer only passes it on: forward the shallowest
    bad block is the producer, backward the deepest.
    """
    wrong = np.nan_to_num(np.asarray(bad, np.float64)) > 0
    return _first(steps, depths, wrong, backward)


def first_divergence(
    steps: ArrayLike,
    depths: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    tolerance: float = 0.1,
    patience: int = 3,
) -> Place | None:
    """First step and shallowest block at which two runs differ by more than their seeds do.

    ``first`` and ``second`` are (steps, depths), or (seeds, steps, depths) with one repetition per
    seed. They differ where the gap between the two groups is wider than the widest spread inside a
    group and than ``tolerance`` times the larger magnitude, for ``patience`` recorded steps in a row
    (fewer at the end of the run). With one seed on each side only the tolerance tells.
    """
    one, two = (np.asarray(runs, np.float64) for runs in (first, second))
    one, two = (runs[None] if runs.ndim == 2 else runs for runs in (one, two))
    with np.errstate(invalid="ignore"):
        gap = np.maximum(two.min(axis=0) - one.max(axis=0), one.min(axis=0) - two.max(axis=0))
        spread = np.maximum(np.ptp(one, axis=0), np.ptp(two, axis=0))
    size = np.maximum(np.abs(one).max(axis=0), np.abs(two).max(axis=0))
    apart = (gap > spread) & (gap > tolerance * size)
    lasting = apart.copy()
    for later in range(1, patience):
        lasting[:-later] &= apart[later:]
    return _first(steps, depths, lasting)


def _finite(depths: ArrayLike, values: ArrayLike) -> tuple[Floats, Floats]:
    """Block numbers from one and finite values, in order of depth."""
    place, value = np.asarray(depths, np.float64) + 1, np.asarray(values, np.float64)
    order = np.argsort(place, kind="stable")
    order = order[np.isfinite(value[order]) & (place[order] >= 1)]
    return place[order], value[order]


def _positive(depths: ArrayLike, values: ArrayLike) -> tuple[Floats, Floats]:
    place, value = _finite(depths, values)
    return place[value > 0], value[value > 0]


def _line(x: Floats, y: Floats, weight: Floats | None = None) -> tuple[float, float]:
    """Slope and intercept of the least-squares line of y on x."""
    x_mean, y_mean = np.average(x, weights=weight), np.average(y, weights=weight)
    scale = np.ones_like(x) if weight is None else weight
    spread = (scale * (x - x_mean) ** 2).sum()
    slope = float((scale * (x - x_mean) * (y - y_mean)).sum() / spread) if spread else nan
    return slope, float(y_mean - slope * x_mean)


def _r2(values: Floats, fitted: Floats) -> float:
    spread = float(((values - values.mean()) ** 2).sum())
    return 1 - float(((values - fitted) ** 2).sum()) / spread if spread else nan


def _laws(place: Floats, value: Floats) -> list[GrowthLaw]:
    """The three candidates, the simplest first: it wins a tie."""
    slope = depth_slope(place - 1, value)
    logs = np.log(value)
    rise, start = _line(place, value, value**-2.0)
    line = start + rise * place
    linear_r2 = _r2(logs, np.log(line)) if line.min() > 0 else -np.inf
    power_start = exp(float((logs - slope.exponent * np.log(place)).mean()))
    first = exp(float((logs - slope.per_block * place).mean()))
    return [
        GrowthLaw("linear", rise, start, linear_r2),
        GrowthLaw("power", slope.exponent, power_start, slope.exponent_r2),
        GrowthLaw("exponential", slope.per_block, first, slope.per_block_r2),
    ]


def _jump(place: Floats, value: Floats) -> Jump:
    factors = value[1:] / value[:-1]
    at = int(np.abs(np.log(factors)).argmax())
    return Jump(int(place[at + 1]) - 1, float(factors[at]))


def _levels_r2(place: Floats, value: Floats, jump: Jump) -> float:
    """R2 of log value for two flat levels, before the jump and from it on."""
    logs, late = np.log(value), place > jump.depth
    if late.all() or not late.any():
        return nan
    return _r2(logs, np.where(late, logs[late].mean(), logs[~late].mean()))


def _sentence(law: GrowthLaw) -> str:
    verb = "grows" if law.slope > 0 else "falls"
    if law.kind == "linear":
        return f"{verb} linearly by {abs(law.slope):.3g} per block"
    if law.kind == "power":
        return f"{verb} like depth^{law.slope:.2g}"
    return f"{verb} exponentially, times {exp(law.slope):.3g} per block"


def _first(
    steps: ArrayLike, depths: ArrayLike, wrong: NDArray[np.bool_], deepest: bool = False
) -> Place | None:
    row = np.flatnonzero(wrong.any(axis=1))
    if not row.size:
        return None
    where = np.asarray(depths)[wrong[row[0]]]
    return Place(int(np.asarray(steps)[row[0]]), int(where.max() if deepest else where.min()))
