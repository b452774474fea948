"""A run read once for its page: arrays by metric, curves, and the rows that are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dynscope.catalogue import Metric
from dynscope.reading.run import Run
from dynscope.reports.numbers.curves import Curve, noun_of, parameter_curves, site_curves
from dynscope.reports.numbers.thinning import Drawn, affordable_rows, thin

Floats = NDArray[np.floating]
Steps = NDArray[np.int64]


@dataclass(frozen=True)
class Measured:
    """A run, read once: its arrays by metric, its curves, and the rows that are drawn.

    ``share`` is the part of a page's bytes that this run may take.
    """

    run: Run
    share: float = 1.0
    _arrays: dict[str, Floats] = field(default_factory=dict, repr=False)

    @cached_property
    def noun(self) -> str:
        """What the run's depths count: blocks or layers."""
        return noun_of(self.run.sites)

    @cached_property
    def site_curves(self) -> tuple[Curve, ...]:
        return site_curves(self.run.sites)

    @cached_property
    def parameter_curves(self) -> tuple[Curve, ...]:
        return parameter_curves(self.run.parameters, self.noun)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics over depth: those of sites and of parameters."""
        return tuple(m for m in self.run.metrics if m.axes[-1] in ("site", "parameter"))

    def array(self, name: str) -> Floats:
        """Every row of a metric, (steps, columns[, 3])."""
        if name not in self._arrays:
            self._arrays[name] = np.asarray(self.run[name].values)
        return self._arrays[name]

    def has(self, name: str) -> bool:
        return name in self.run

    @cached_property
    def drawn(self) -> Drawn:
        """The rows of the step axis that are drawn."""
        columns = 3 * len(self.run.sites) * self.has("massive/value")
        for metric in self.metrics:
            if metric.axes[0] == "step":
                columns += _columns(self.curves(metric))
        most = affordable_rows(columns, self.share)
        return thin(self.run.steps, most, _extreme_rows(self))

    @cached_property
    def drawn_weights(self) -> Drawn:
        """The rows of the weight axis that are drawn."""
        weights = [metric for metric in self.metrics if metric.axes[0] == "weight_step"]
        columns = sum(_columns(self.curves(metric)) for metric in weights)
        return thin(self.run.weight_steps, affordable_rows(columns, self.share / 4))

    @property
    def told(self) -> Drawn:
        """The drawn rows that a page speaks of: of a run of weights alone, those of its weights."""
        return self.drawn if len(self.run.steps) else self.drawn_weights

    def curves(self, metric: Metric) -> tuple[Curve, ...]:
        return self.site_curves if metric.axes[-1] == "site" else self.parameter_curves

    def rows(self, metric: Metric) -> Drawn:
        return self.drawn if metric.axes[0] == "step" else self.drawn_weights

    @cached_property
    def stream(self) -> Curve | None:
        """The curve that stands for the residual stream, or for all layers where there is none."""
        joined = [curve for curve in self.site_curves if curve.joined and not curve.among]
        return joined[0] if joined else None

    @cached_property
    def twins(self) -> tuple[Curve, ...]:
        """Sublayers whose output is the block's own, as they add the residual and normalize inside."""
        sizes = [
            f"activation/{name}"
            for name in ("rms", "absmax", "mean_abs")
            if self.has(f"activation/{name}")
        ]
        stream = self.stream
        if stream is None or stream.role != "block" or not sizes:
            return ()
        return tuple(
            curve for curve in self.site_curves
            if curve.role != "block" and np.array_equal(curve.depths, stream.depths)
            and all(self._alike(name, curve, stream) for name in sizes)
        )  # fmt: skip

    def _alike(self, name: str, one: Curve, other: Curve) -> bool:
        a, b = (curve.values(self.array(name)) for curve in (one, other))
        return bool(np.isfinite(a).any()) and same(a, b)

    @cached_property
    def gradient_norm(self) -> Floats:
        """Norm of all gradients together, at every recorded step; NaN where none is known."""
        if not self.has("gradient/norm") or not len(self.run.steps):
            return np.full(len(self.run.steps), np.nan)
        squares = self.array("gradient/norm").astype(np.float64) ** 2
        known = np.isfinite(squares).any(axis=1) | np.isinf(squares).any(axis=1)
        return np.where(known, np.sqrt(np.nansum(squares, axis=1)), np.nan)

    def scalar(self, name: str) -> tuple[Steps, Floats]:
        line = self.run.scalars(name)
        return np.asarray(line["step"].values), np.asarray(line.values)

    @cached_property
    def loss_names(self) -> tuple[str, ...]:
        """Scalars that are losses by their name, the plainest first."""
        named = [name for name in self.run.scalar_names if "loss" in name.lower()]
        return tuple(sorted(named, key=lambda name: (name != "loss", len(name), name)))


def same(one: Floats, other: Floats) -> bool:
    """Whether two curves are statistics of one tensor: equal but for the order of a sum."""
    finite = np.abs(other[np.isfinite(other)])
    least = 1e-6 * float(finite.max(initial=0))
    return bool(np.allclose(one, other, rtol=1e-6, atol=least, equal_nan=True))


def block_ratio(measured: Measured) -> tuple[Steps, Floats] | None:
    """Relative update per block: its indices, and (steps, blocks) of sqrt(sum u^2 / sum w^2).

    The weights' norms follow from update/norm and update/ratio, so no weight is read for it.
    """
    if not (measured.has("update/norm") and measured.has("update/ratio")):
        return None
    depth = np.array([one.depth for one in measured.run.parameters], np.int64)
    indices = np.unique(depth[depth >= 0])
    norm = measured.array("update/norm").astype(np.float64)
    ratio = measured.array("update/ratio").astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = np.where(ratio > 0, norm / ratio, np.nan)
        found = [
            np.sqrt(np.nansum(norm[:, own] ** 2, axis=1) / np.nansum(weight[:, own] ** 2, axis=1))
            for own in (depth == index for index in indices)
        ]
    return (indices, np.stack(found, axis=1)) if found else None


def _columns(curves: Sequence[Curve]) -> int:
    return sum(len(curve.columns) for curve in curves)


def _extreme_rows(measured: Measured) -> list[int]:
    """Rows that must be seen: largest loss, gradient norm and activation."""
    lines = [measured.gradient_norm]
    if measured.has("activation/absmax"):
        absmax = measured.array("activation/absmax")
        lines.append(np.nanmax(absmax, axis=1, initial=0) if absmax.size else absmax[:, :0])
    found = [int(np.nanargmax(one)) for one in lines if one.size and np.isfinite(one).any()]
    for name in measured.loss_names[:1]:
        steps, values = measured.scalar(name)
        if np.isfinite(values).any():
            found.append(int(np.searchsorted(measured.run.steps, steps[np.nanargmax(values)])))
    return found
