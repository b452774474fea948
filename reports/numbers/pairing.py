"""Several runs side by side: what they have in common, what differs, in plain arrays."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynscope.catalogue import Metric
from dynscope.reading.run import Run
from dynscope.reports.elements import theme
from dynscope.reports.numbers.measured import Floats, Measured, Steps
from dynscope.reports.numbers.summaries import LINEAR, Series
from dynscope.reports.numbers.thinning import affordable_rows, thin

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Side:
    """One of the runs compared: ``place`` in the order given, ``label`` what it is called."""

    place: int
    label: str
    measured: Measured

    @property
    def letter(self) -> str:
        return LETTERS[self.place]

    @property
    def colour(self) -> str:
        return theme.PALETTE[self.place % len(theme.PALETTE)]

    @property
    def mark(self) -> str:
        return theme.MARKS[self.place % len(theme.MARKS)]

    @property
    def name(self) -> str:
        return f"{self.letter}: {self.label}"

    @property
    def blocks(self) -> int:
        """Number of blocks, or of layers in call order: depths run from 0 to one less."""
        stream = self.measured.stream
        if stream is None:
            return 0
        depths = stream.depths.tolist()
        if stream.noun == "layer":  # of which the curve may hold one kind only
            depths += [site.depth for site in self.measured.run.sites]
            depths += [one.depth for one in self.measured.run.parameters]
        return int(max(depths)) + 1


@dataclass(frozen=True)
class Difference:
    """``second`` against ``first`` of one curve, at common layers and common recorded steps.

    ``values`` is (steps, depths): the base-10 logarithm of second over first where ``ratio``, else
    second minus first. ``equal`` is whether every value is the same, or missing in both.
    """

    first: Side
    second: Side
    steps: Steps
    series: Series
    ratio: bool
    equal: bool


def labels_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """The runs' names, or their files' where names are missing or repeat."""
    names = [run.metadata.name or run.path.stem for run in runs]
    return tuple(
        name if names.count(name) == 1 else run.path.stem
        for name, run in zip(names, runs, strict=True)
    )


def common_metrics(sides: Sequence[Side]) -> tuple[Metric, ...]:
    """Metrics over depth that at least one run has, in the order in which they appear."""
    found = {metric.name: metric for side in sides for metric in side.measured.metrics}
    return tuple(found.values())


def differences(sides: Sequence[Side], metric: Metric, most: int) -> tuple[Difference, ...]:
    """Every later run against the first, for each curve that both have; most ``most`` rows each."""
    first, *others = sides
    return tuple(one for other in others for one in _pair(first, other, metric, most))


def affordable(sides: Sequence[Side], share: float) -> int:
    """Rows of every difference that fit into ``share`` of the page."""
    first, *others = sides
    columns = sum(
        sum(len(curve.columns) for curve in first.measured.curves(metric) if not curve.minor)
        for metric in first.measured.metrics
    )
    return affordable_rows(columns * len(others), share)


def settings_that_differ(configs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Entries of (nested) configurations that are not the same in all of them, as text."""
    flat = [dict(_flat(config)) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one)
    found = {key: tuple(one.get(key, "–") for one in flat) for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def only_in(sides: Sequence[Side]) -> Iterator[tuple[str, str, str]]:
    """Metrics and layers that not every run has: (what, name, letters of the runs that have it)."""
    for what, held in (
        ("metric", [[m.name for m in side.measured.run.metrics] for side in sides]),
        ("layer", [[s.path for s in side.measured.run.sites] for side in sides]),
        ("parameter", [[p.name for p in side.measured.run.parameters] for side in sides]),
        ("scalar", [list(side.measured.run.scalar_names) for side in sides]),
    ):
        sets = [set(names) for names in held]
        for name in dict.fromkeys(name for names in held for name in names):
            having = [side.letter for side, names in zip(sides, sets, strict=True) if name in names]
            if len(having) < len(sides):
                yield what, name, ", ".join(having)


def common_rows(first: Measured, second: Measured, axis: str) -> tuple[Steps, Steps, Steps]:
    """Steps that both recorded, and their rows in each."""
    ours, theirs = (
        one.run.steps if axis == "step" else one.run.weight_steps for one in (first, second)
    )
    return np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)


def _pair(first: Side, second: Side, metric: Metric, most: int) -> Iterator[Difference]:
    one, two = first.measured, second.measured
    if not (one.has(metric.name) and two.has(metric.name)):
        return
    steps, ours, theirs = common_rows(one, two, metric.axes[0])
    rows = thin(steps, most).rows
    first_rows = one.array(metric.name)[ours[rows]]
    second_rows = two.array(metric.name)[theirs[rows]]
    matching = {curve.key: curve for curve in two.curves(metric)}
    ratio = metric.short not in LINEAR
    for curve in one.curves(metric):
        other = matching.get(curve.key)
        if other is None or curve.minor or not curve.joined or not len(rows):
            continue
        depths, mine, its = np.intersect1d(curve.depths, other.depths, return_indices=True)
        a, b = curve.values(first_rows)[:, mine], other.values(second_rows)[:, its]
        if not len(depths) or np.isnan(a).all() or np.isnan(b).all():
            continue
        names = tuple(curve.names[place] for place in mine)
        common = replace(curve, columns=curve.columns[mine], depths=depths, names=names)
        series = Series(common, difference_of(a, b, ratio))
        same = np.array_equal(a, b, equal_nan=True)
        yield Difference(first, second, steps[rows], series, ratio, same)


def difference_of(first: Floats, second: Floats, ratio: bool) -> Floats:
    """log10(second / first), or second - first; 0 where both are the same, also where not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log10(second / first) if ratio else second - first
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    return np.where(same, np.where(np.isnan(first), np.nan, 0), found)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
