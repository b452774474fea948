"""The scale of trained weights against learning rate and weight decay.

With decoupled weight decay (AdamW) weights forget within tau = 1 / (eta * decay) steps, and settle
where what is added balances what decays: at a scale that grows like sqrt(eta / decay).
Source: Weibull weight magnitudes, arXiv 2605.18898. How to read it: docs/weibull.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynscope.analysis.verdicts import FFN_ROLES
from dynscope.reading.run import Run
from dynscope.site import undivided

Floats = NDArray[np.float64]

PUBLISHED_COEFFICIENT = 0.087
"""Lambda of trained FFN matrices over sqrt(eta / decay), fitted by the paper over its models, r = 0.94."""

SATURATED, APPROACHING = 1.0, 0.2


@dataclass(frozen=True)
class Saturation:
    """The FFN matrices of one optimizer group at every step at which weights were measured.

    ``lam`` is the median Weibull scale of the matrices, in weight units; ``forgotten`` is T / tau:
    the sum of learning rate times decay over the steps so far; ``scale`` is sqrt(eta / decay) by
    the learning rate of that step and ``peak_scale`` by the largest until then. All are (steps,).
    """

    group: int
    steps: NDArray[np.int64]
    lam: Floats
    forgotten: Floats
    scale: Floats
    peak_scale: Floats

    @property
    def word(self) -> str:
        """ "saturated", "approaching saturation" or "in transition", by T / tau at the end."""
        if self.forgotten[-1] >= SATURATED:
            return "saturated"
        return "approaching saturation" if self.forgotten[-1] >= APPROACHING else "in transition"


class ScaleLaw(NamedTuple):
    """``lam = coefficient * scale`` by least squares; ``r`` is Pearson's, NaN where scale is one."""

    coefficient: float
    r: float
    points: int


def saturation(run: Run) -> tuple[Saturation, ...]:
    """One entry per optimizer group that decays FFN matrices; none where the run cannot tell."""
    needed = ("optimizer/lr", "optimizer/weight_decay", "weight/weibull_lambda")
    if not all(name in run for name in needed) or not len(run.steps) or not len(run.weight_steps):
        return ()
    return tuple(_groups(run))


def scale_law(scale: Floats, lam: Floats) -> ScaleLaw:
    """The line through the origin of ``lam`` on ``scale``, (points,), NaN left out."""
    known = np.isfinite(scale) & np.isfinite(lam) & (scale > 0)
    x, y = scale[known], lam[known]
    if not len(x):
        return ScaleLaw(nan, nan, 0)
    varied = len(x) > 2 and np.ptp(x) > 1e-6 * x.max() and np.ptp(y) > 0
    r = float(np.corrcoef(x, y)[0, 1]) if varied else nan
    return ScaleLaw(float((x * y).sum() / (x * x).sum()), r, len(x))


def _groups(run: Run) -> Iterator[Saturation]:
    every = run.parameters
    finest = {one.name for one in undivided(every)}
    rates = np.asarray(run["optimizer/lr"].values, np.float64)
    decays = np.asarray(run["optimizer/weight_decay"].values, np.float64)
    scales = np.asarray(run["weight/weibull_lambda"].values, np.float64)
    at = np.maximum(np.searchsorted(run.steps, run.weight_steps, side="right") - 1, 0)
    for group in range(rates.shape[1]):
        columns = [
            i for i, one in enumerate(every)
            if one.group == group and one.role in FFN_ROLES and len(one.shape) > 1
            and one.depth >= 0 and one.name in finest
        ]  # fmt: skip
        rate, decay = rates[:, group], decays[:, group]
        if not columns or not np.nanmax(rate * decay, initial=0) > 0:
            continue
        lam = scales[:, columns]
        known = np.isfinite(lam).any(axis=1)
        if not known.any():
            continue
        rows = at[known]
        ratio, peak = (each / np.where(decay > 0, decay, nan)
                       for each in (rate, np.fmax.accumulate(rate)))  # fmt: skip
        yield Saturation(
            group, np.asarray(run.weight_steps)[known], np.nanmedian(lam[known], axis=1),
            _forgotten(run.steps, rate * decay)[rows], np.sqrt(ratio)[rows], np.sqrt(peak)[rows],
        )  # fmt: skip


def _forgotten(steps: NDArray[np.int64], per_step: Floats) -> Floats:
    """The sum of ``per_step`` until each recorded step; steps between follow a straight line."""
    per_step = np.nan_to_num(per_step)
    before, after = per_step[:-1], per_step[1:]
    # Of the steps between two recorded ones the later is included, the earlier was before.
    between = (before + after) / 2 * np.diff(steps) + (after - before) / 2
    return np.cumsum(np.concatenate([[per_step[0] * steps[0]], between]))
