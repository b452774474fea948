"""Figures of several runs: profiles laid over each other, maps of their differences."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dynscope.catalogue import Metric
from dynscope.reports.drawing.axes import (
    Axis,
    depth_axis,
    extent,
    log_places,
    log_ticks,
    reach,
    step_axis,
    value_axis,
)
from dynscope.reports.drawing.figures import (
    Trace,
    curve_trace,
    layout,
    line_trace,
    matrix_of,
    training_chart,
)
from dynscope.reports.elements import theme, words
from dynscope.reports.elements.charts import Binding, Chart, Matrix
from dynscope.reports.numbers.curves import Curve
from dynscope.reports.numbers.measured import Floats
from dynscope.reports.numbers.pairing import Difference, Side
from dynscope.reports.numbers.summaries import Line, Profile, massive

RELATIVE_AXIS: Axis = {
    "title": {"text": "relative depth"}, "range": [-0.09, 1.09], "zeroline": False,
    "tickvals": [0, 0.25, 0.5, 0.75, 1], "ticktext": ["first", "¼", "½", "¾", "last"],
}  # fmt: skip


def overlay_chart(
    profiles: Sequence[tuple[Side, Profile]], metric: Metric, identity: str, relative: bool
) -> Chart:
    """One metric of all runs over depth; one kind of layer at a time, a colour for each run."""
    labels = list(dict.fromkeys(one.curve.label for _, found in profiles for one in found.plain))
    traces: list[Trace] = []
    bindings: list[Binding] = []
    for side, found in profiles:
        for one in found.plain:
            matrix = matrix_of(found, one, side.place)
            bindings.append(Binding(len(traces), "y", (matrix,), "row"))
            shown = one.curve.label == labels[0]
            traces.append(_run_trace(side, one.curve, one.values[-1], relative, shown))
    log = all(found.log for _, found in profiles)
    reaches = _reaches(profiles, labels, log)
    y = value_axis(words.literal(words.quantity(metric.short, metric.unit)), log)
    y |= reaches[words.literal(labels[0])]
    spec = {"data": traces, "layout": _layout(_curves(profiles), y, relative, reaches=reaches)}
    return Chart(identity, "Over depth", spec, tuple(bindings), "group", log_button=True)


def difference_chart(
    found: Sequence[Difference], identity: str, log_steps: bool = False
) -> Chart | None:
    """Depth by step, each later run against the first; None where no two rows are common."""
    drawn = [one for one in found if len(one.steps) > 1 and len(one.series.curve.depths) > 1]
    if not drawn:
        return None
    many = len({one.second.letter for one in drawn}) > 1
    traces, bindings = [], []
    for place, one in enumerate(drawn):
        pair = f"{one.second.letter} against {one.first.letter}"
        name = f"{pair}: {one.series.curve.label}" if many else one.series.curve.label
        matrix = Matrix(f"{identity}|{name}", one.steps, one.series.values)
        bindings += [
            Binding(place, "z", (matrix,), "map"),
            Binding(place, "customdata", (matrix,), "power map" if one.ratio else "map"),
            Binding(place, "x", (matrix,), "log steps" if log_steps else "steps"),
        ]
        x = log_places(one.steps) if log_steps else one.steps
        traces.append(_difference_map(one, name, place == 0) | {"x": x})
    y = depth_axis([one.series.curve for one in drawn]) | {"showgrid": False}
    x_axis = step_axis(np.concatenate([one.steps for one in drawn]), log_steps)
    spec = {"data": traces, "layout": layout(x_axis | {"showgrid": False}, y)}
    title = "Ratio to a" if drawn[0].ratio else "Difference from a"
    if not many:
        title = "b over a" if drawn[0].ratio else "b minus a"
    return Chart(identity, title, spec, tuple(bindings), "one", time="x")


def lines_overlay(
    lines: Sequence[tuple[Side, Line]], identity: str, label: str, log: bool = False
) -> tuple[Chart, ...]:
    """One quantity of all runs over the training: one chart, none where no run holds a number."""
    seen = [(side, one) for side, one in lines if one.finite.any()]
    traces = [line_trace(one, side.name, side.colour) for side, one in seen]
    return training_chart([one for _, one in seen], traces, identity, label, log)


def massive_overlay(sides: Sequence[Side], identity: str, relative: bool) -> Chart | None:
    """The largest element of every block of all runs against depth, with channel and token."""
    traces: list[Trace] = []
    bindings: list[Binding] = []
    curves, values = [], []
    for side in sides:
        found = massive(side.measured)
        if found is None:
            continue
        parts = [part[:, :, 0] for part in (found.magnitude, found.channel, found.token)]
        value, channel, token = (
            Matrix(f"massive|{side.letter}|{place}", found.steps, part)
            for place, part in enumerate(parts)
        )
        bindings += [
            Binding(len(traces), "y", (value,), "row"),
            Binding(len(traces), "customdata", (channel, token), "pairs"),
        ]
        trace = _run_trace(side, found.curve, parts[0][-1], relative, True)
        traces.append(trace | {
            "customdata": np.stack([part[-1] for part in parts[1:]], axis=1),
            "hovertemplate": "<b>%{y:.4~g}</b><br>channel %{customdata[0]}, token %{customdata[1]}",
        })  # fmt: skip
        curves.append(found.curve)
        values.append(parts[0])
    if not traces:
        return None
    y = value_axis("largest magnitude (model units)", True, values)
    spec = {"data": traces, "layout": _layout(curves, y, relative)}
    return Chart(identity, "Over depth", spec, tuple(bindings), log_button=True)


def relative_depth(curve: Curve, blocks: int) -> Floats:
    """Depth as a share of the run's blocks: the first is 0, the last 1; what is outside is beside."""
    share = curve.depths / max(blocks - 1, 1)
    beside = np.where(curve.depths < 0, -0.06, np.where(curve.depths >= blocks, 1.06, share))
    return np.asarray(beside, np.float64)


def _run_trace(side: Side, curve: Curve, values: Any, relative: bool, shown: bool) -> Trace:
    trace = curve_trace(
        curve, values, side.colour, name=words.literal(side.name),
        legendgroup=words.literal(curve.label), visible=True if shown else "legendonly",
        hovertemplate="%{customdata}: <b>%{y:.4~g}</b>",
    )  # fmt: skip
    if relative:
        share = relative_depth(curve, side.blocks)
        trace |= {"x": share, "meta": {"absolute": curve.depths, "relative": share}}
    trace["marker"] = trace["marker"] | {"symbol": side.mark}
    return trace


def _layout(curves: Sequence[Curve], y: Axis, relative: bool, **meta: Any) -> dict[str, Any]:
    absolute = depth_axis(curves)
    if not relative:
        return layout(absolute, y, meta=meta)
    axes = {"absolute": absolute, "relative": RELATIVE_AXIS}
    return layout(RELATIVE_AXIS, y, meta=meta | axes)


def _reaches(
    profiles: Sequence[tuple[Side, Profile]], labels: Sequence[str], log: bool
) -> dict[str, Axis]:
    """Range and ticks of the value axis for each kind of layer, over all runs and steps."""
    every = [one for _, profile in profiles for one in profile.series]
    return {
        words.literal(label): reach([one.values for one in every if one.curve.label == label], log)
        for label in labels
    }


def _curves(profiles: Sequence[tuple[Side, Profile]]) -> list[Curve]:
    return [one.curve for _, found in profiles for one in found.plain]


def _difference_map(one: Difference, name: str, visible: bool) -> Trace:
    z = np.where(np.isfinite(one.series.values), one.series.values, np.nan).T
    span = extent([np.abs(z)])
    most = (span[1] if span else 0) or (0.01 if one.ratio else 1.0)
    bar: Axis = {"thickness": 10, "outlinewidth": 0, "len": 1, "x": 1.01, "xpad": 4}
    times = "×" if one.ratio else ""
    if one.ratio:
        bar |= log_ticks(-most, most, logarithms=True)
    return {
        "type": "heatmap", "name": words.literal(name), "x": one.steps, "y": one.series.curve.depths,
        "z": z, "customdata": 10.0**z if one.ratio else z, "zmin": -most, "zmax": most, "colorscale": [list(stop) for stop in theme.DIVERGING],
        "colorbar": bar, "visible": True if visible else "legendonly", "showlegend": True,
        "hoverongaps": False,
        "hovertemplate": f"{one.series.curve.noun} %{{y}}, step %{{x:,d}}: <b>{times}%{{customdata:.3~g}}</b>",
    }  # fmt: skip
