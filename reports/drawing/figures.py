"""Figures of one run, from summaries: profiles over depth, maps, lines over the training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dynscope.analysis.depth import GrowthLaw
from dynscope.reports.drawing.axes import (
    Axis,
    depth_axis,
    extent,
    log_places,
    log_ticks,
    step_axis,
    value_axis,
)
from dynscope.reports.elements import theme, words
from dynscope.reports.elements.charts import Binding, Chart, How, Matrix, Spec
from dynscope.reports.numbers import plateau
from dynscope.reports.numbers.curves import Curve
from dynscope.reports.numbers.summaries import Line, Massive, Profile, Series

Trace = dict[str, Any]

MOST_MARKED = 24  # points beyond which a line over the training has no marks
MOST_GHOSTS = 3  # curves beyond which those of the first step would only be a tangle
VALUE = "%{y:.4~g}"
_DASH = {"lowest": "dot", "highest": "dot"}


def layout(x: Axis, y: Axis, **more: Any) -> dict[str, Any]:
    margin = {"l": 56, "r": 16, "t": 10, "b": 44}
    return {
        "xaxis": x, "yaxis": y, "margin": margin, "hovermode": "closest",
        "template": theme.LIGHT, "height": 340,
    } | more  # fmt: skip


def matrix_of(profile: Profile, series: Series, run: int = 0) -> Matrix:
    """The numbers of one curve of a profile, for the page; ``run`` tells runs apart."""
    # Labels may repeat in odd models; the first layer's name does not.
    name = f"{run}|{profile.metric.name}|{series.curve.label}|{series.curve.names[0]}"
    return Matrix(name, profile.steps, series.values)


def curve_trace(curve: Curve, values: Any, colour: str, **more: Any) -> Trace:
    """One curve over depth; the names of its layers are shown on hover."""
    lone = len(curve.depths) == 1 or not curve.joined
    place = f"{curve.noun} %{{x}}: " if curve.joined else ""
    return {
        "type": "scatter",
        "name": words.literal(curve.label),
        "x": curve.depths,
        "y": values,
        "customdata": [words.literal(name) for name in curve.names],
        "mode": "markers" if lone else "lines+markers",
        "line": {"color": colour, "width": 2, "dash": _DASH.get(curve.among, "solid")},
        "marker": {
            "color": colour,
            "size": 9 if lone else 6,
            "symbol": theme.role_mark(curve.role),
        },
        "hovertemplate": f"%{{customdata}}<br>{place}<b>{VALUE}</b>",
    } | more


def profile_chart(profile: Profile, identity: str) -> Chart:
    """A metric over depth at one step, the first step behind it, and the growth law."""
    traces: list[Trace] = []
    bindings: list[Binding] = []
    plain = {one.curve.key for one in profile.plain}
    ghosts = (
        len(profile.steps) > 1 and sum(one.curve.joined for one in profile.plain) <= MOST_GHOSTS
    )
    for place, one in enumerate(profile.series):
        colour = theme.role_colour(one.curve.role, place)
        shown = one.curve.key in plain
        if one.curve.joined and ghosts and shown:
            traces.append(_first_step(one, colour))
        bindings.append(Binding(len(traces), "y", (matrix_of(profile, one),), "row"))
        hidden = {} if shown else {"visible": "legendonly"}
        traces.append(curve_trace(one.curve, one.values[-1], colour, **hidden))
    notes, captions = _add_law(profile, traces, bindings)
    title = words.quantity(profile.metric.short, profile.metric.unit)
    y = value_axis(words.literal(title), profile.log, (s.values for s in profile.plain))
    spec = {"data": traces, "layout": layout(depth_axis([s.curve for s in profile.series]), y)}
    return Chart(
        id=identity, title="Over depth", spec=spec, bindings=tuple(bindings), notes=notes,
        note_steps=profile.steps, captions=captions, log_button=True,
    )  # fmt: skip


def map_chart(profile: Profile, identity: str) -> Chart | None:
    """Depth by step, one curve of the profile at a time; None without curves over depth."""
    shown = [one for one in profile.series if one.curve.joined and len(one.curve.depths) > 1]
    if not shown or len(profile.steps) < 2:
        return None
    how: How = "log map" if profile.log else "map"
    on_weights = profile.metric.axes[0] == "weight_step"
    traces: list[Trace] = []
    bindings: list[Binding] = []
    for place, one in enumerate(shown):
        matrix = matrix_of(profile, one)
        x = log_places(profile.steps) if on_weights else profile.steps
        traces.append(_heatmap(one, profile, visible=place == 0) | {"x": x})
        bindings += [
            Binding(place, "z", (matrix,), how),
            Binding(place, "customdata", (matrix,), "map"),
            Binding(place, "x", (matrix,), "log steps" if on_weights else "steps"),
        ]
    y = depth_axis([one.curve for one in shown]) | {"showgrid": False}
    x_axis = step_axis(profile.steps, log=on_weights) | {"showgrid": False}
    spec = {"data": traces, "layout": layout(x_axis, y)}
    return Chart(
        id=identity, title="Over depth and training", spec=spec, bindings=tuple(bindings),
        pick="one", time="x",
    )  # fmt: skip


def lines_chart(
    lines: Sequence[Line], identity: str, label: str, log: bool = False
) -> tuple[Chart, ...]:
    """Quantities over the training: one chart, none where no line holds a number."""
    seen = [one for one in lines if one.finite.any()]
    traces = [
        line_trace(one, one.name, theme.PALETTE[place % len(theme.PALETTE)])
        for place, one in enumerate(seen)
    ]
    return training_chart(seen, traces, identity, label, log)


def line_trace(one: Line, name: str, colour: str) -> Trace:
    """One line over the training; few points are marked, so that single ones are seen."""
    points = int(one.finite.sum())
    mode = "lines" if points > MOST_MARKED else "lines+markers" if points > 1 else "markers"
    return {
        "type": "scatter",
        "name": words.literal(name),
        "x": one.steps,
        "y": one.values,
        "mode": mode,
        "line": {"color": colour, "width": 1.6},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": f"step %{{x:,d}}: <b>{VALUE}</b>",
    }


def training_chart(
    lines: Sequence[Line], traces: list[Trace], identity: str, label: str, log: bool
) -> tuple[Chart, ...]:
    """The chart of ``lines`` drawn as ``traces``, none where there is no line."""
    if not lines:
        return ()
    log = log and extent((one.values for one in lines), positive=True) is not None
    values = [one.values for one in lines]
    span = extent(values)
    constant = span is not None and span[0] == span[1]  # Plotly would show it between -1 and 1
    y = value_axis(words.literal(label), log, values if log or constant else ())
    x = step_axis(np.concatenate([one.steps for one in lines]))
    spec = {"data": traces, "layout": layout(x, y, height=280)}
    return (Chart(identity, "Over the training", spec, time="x", log_button=True),)


def massive_chart(massive: Massive, identity: str) -> Chart:
    """Top 1, 2, 3 and the median of every block's output against depth (Sun et al., figure 1)."""
    traces, bindings = [], []
    hover = f"{massive.curve.noun} %{{x}}: <b>{VALUE}</b><br>channel %{{customdata[0]}}, token %{{customdata[1]}}"
    for rank in range(massive.magnitude.shape[2]):
        parts = (massive.magnitude, massive.channel, massive.token)
        value, channel, token = (
            Matrix(f"massive|{name}|{rank}", massive.steps, part[:, :, rank])
            for name, part in zip(("value", "channel", "token"), parts, strict=True)
        )
        bindings += [
            Binding(rank, "y", (value,), "row"),
            Binding(rank, "customdata", (channel, token), "pairs"),
        ]
        where = np.stack([channel.values[-1], token.values[-1]], axis=1)
        trace = curve_trace(massive.curve, value.values[-1], theme.PALETTE[(1, 4, 3)[rank]])
        trace["marker"] = trace["marker"] | {"symbol": ("circle", "square", "diamond")[rank]}
        traces.append(trace | {"name": f"top {rank + 1}", "customdata": where,
                               "hovertemplate": hover})  # fmt: skip
    if massive.median is not None:
        matrix = Matrix("massive|median", massive.steps, massive.median)
        bindings.append(Binding(len(traces), "y", (matrix,), "row"))
        traces.append(
            curve_trace(massive.curve, massive.median[-1], theme.GREY) | {"name": "median"}
        )
    every = [massive.magnitude] + ([] if massive.median is None else [massive.median])
    y = value_axis("magnitude (model units)", True, every)
    spec = {"data": traces, "layout": layout(depth_axis([massive.curve]), y, height=380)}
    return Chart(id=identity, title="Largest elements over depth", spec=spec,
                 bindings=tuple(bindings), log_button=True, notes=plateau.notes(massive),
                 note_steps=massive.steps)  # fmt: skip


def with_reference(chart: Chart, values: Sequence[tuple[float, str]], band: Sequence[float] = ()) \
        -> Chart:  # fmt: skip
    """``chart`` with named level lines and, from ``band[0]`` to ``band[1]``, a tinted strip."""
    shapes = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at,
         "line": {"color": theme.GREY, "width": 1.4, "dash": "dash"}}
        for at, _ in values
    ]  # fmt: skip
    if band:
        shapes.append({"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": band[0],
                       "y1": band[1], "fillcolor": theme.BAND, "line": {"width": 0},
                       "layer": "below"})  # fmt: skip
    log = chart.spec["layout"]["yaxis"].get("type") == "log"
    names = [
        {"xref": "paper", "x": 1, "xanchor": "right", "yanchor": "bottom", "showarrow": False,
         "y": float(np.log10(at)) if log else at, "text": name,
         "font": {"size": 11, "color": theme.GREY}}
        for at, name in values
    ]  # fmt: skip
    more: Spec = {"shapes": shapes, "annotations": names}
    spec = chart.spec | {"layout": chart.spec["layout"] | more}
    return replace(chart, spec=spec)


def _first_step(one: Series, colour: str) -> Trace:
    """The curve at the first drawn step, faint and silent."""
    return {
        "type": "scatter", "x": one.curve.depths, "y": one.values[0], "mode": "lines",
        "line": {"color": colour, "width": 1.2, "dash": "dot"}, "opacity": 0.5,
        "showlegend": False, "hoverinfo": "skip", "legendgroup": words.literal(one.curve.label),
    }  # fmt: skip


def _add_law(
    profile: Profile, traces: list[Trace], bindings: list[Binding]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Draw the growth law of the leading curve; its sentences and its short names, one a step."""
    if profile.laws is None:
        return (), ()
    matrix = Matrix(f"0|{profile.metric.name}|law", profile.steps, profile.laws.values)
    bindings.append(Binding(len(traces), "y", (matrix,), "row"))
    curve = profile.series[0].curve
    captions = tuple(_caption(law, curve.noun) for law in profile.laws.laws)
    traces.append({
        "type": "scatter", "name": captions[-1], "x": profile.laws.depths,
        "y": matrix.values[-1], "mode": "lines", "hoverinfo": "skip",
        "line": {"color": theme.GREY, "width": 2, "dash": "dash"},
    })  # fmt: skip
    label = words.title(curve.label)
    return (
        tuple(f"{label}: {words.law(law.text, curve.noun)}." for law in profile.laws.laws),
        captions,
    )


def _caption(law: GrowthLaw, noun: str) -> str:
    """A law in the legend."""
    if law.kind != "none":
        return "flat" if law.kind == "flat" else f"{law.kind} law"
    if law.jump is None or not law.jump.steep:
        return "no law fits"
    sign = "×" if law.jump.factor > 1 else "÷"
    return f"jump {sign} {words.number(law.jump.fold, 2)} at {noun} {law.jump.depth}"


def _heatmap(one: Series, profile: Profile, visible: bool) -> Trace:
    values = one.values.T
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.log10(values) if profile.log else values
    z = np.where(np.isfinite(z), z, np.nan)
    bar: Axis = {"thickness": 10, "outlinewidth": 0, "len": 1, "x": 1.01, "xpad": 4}
    span = extent([z])
    if profile.log and span is not None:
        bar |= log_ticks(*span, logarithms=True)
    trace = {
        "type": "heatmap", "name": words.literal(one.curve.label), "x": profile.steps,
        "y": one.curve.depths, "z": z, "customdata": values, "colorscale": theme.SEQUENTIAL,
        "colorbar": bar, "visible": True if visible else "legendonly", "showlegend": True,
        "hoverongaps": False,
        "hovertemplate": f"{one.curve.noun} %{{y}}, step %{{x:,d}}: <b>%{{customdata:.4~g}}</b>",
    }  # fmt: skip
    return trace
