"""Cards of one run: for every metric its charts, and the words beside them."""

from dataclasses import replace
from typing import Any

import numpy as np

from dynscope.analysis.by_role import protocol
from dynscope.analysis.verdicts import BAND, bands_hold
from dynscope.catalogue import METRICS, Metric
from dynscope.reports.drawing.figures import (
    lines_chart,
    map_chart,
    massive_chart,
    profile_chart,
    with_reference,
)
from dynscope.reports.elements import words
from dynscope.reports.elements.charts import Card, Chart
from dynscope.reports.numbers.curves import Curve
from dynscope.reports.numbers.measured import Measured, block_ratio
from dynscope.reports.numbers.summaries import (
    Profile,
    Series,
    line,
    massive,
    profile,
    without_twins,
)

HALF_NORMAL = 1.2054
HEALTHY_UPDATE = 1e-3
LEARNING = Metric(
    "update/block_ratio",
    ("step", "block"),
    "1",
    "√Σ‖Δw‖² / √Σ‖w‖² over the parameters of a block, from update/norm and update/ratio",
    "Near 10⁻³ is common early in training, and it falls with the learning rate; a block at a "
    "tenth of its neighbours idles.",
    METRICS["update/ratio"].source,
)


def identity(name: str) -> str:
    """The id of a metric's card."""
    return name.replace("/", "-")


def metric_card(measured: Measured, metric: Metric) -> Card:
    """Profile and map of a metric, or the reason why there is nothing to draw."""
    found = without_twins(measured, profile(measured, metric))
    remark = ""
    charts: tuple[Chart, ...] = ()
    if not found.series:
        remark = f"No value was recorded. {_reason(measured, metric)}".strip()
    else:
        charts = (profile_chart(found, f"{identity(metric.name)}-profile"),)
        heat = map_chart(found, f"{identity(metric.name)}-map")
        if found.constant is None and heat is not None:
            charts += (heat,)
        elif found.constant is not None:
            charts = (with_height(charts[0], 200),)
            remark = f"{words.number(found.constant)} everywhere, at every recorded step."
    return card(metric, charts, remark)


def hero(measured: Measured) -> Chart | None:
    """What is seen first: the residual stream's variance over depth, moved by the slider."""
    if not measured.has("activation/variance"):
        return None
    found = without_twins(measured, profile(measured, METRICS["activation/variance"]))
    if not found.series:
        return None
    return as_hero(profile_chart(found, "hero"))


def as_hero(chart: Chart) -> Chart:
    return replace(with_height(chart, 260), title="Activation variance")


def with_height(chart: Chart, pixels: int) -> Chart:
    layout = chart.spec["layout"] | {"height": pixels}
    return replace(chart, spec=chart.spec | {"layout": layout})


def card(metric: Metric, charts: tuple[Chart, ...], remark: str = "", **more: Any) -> Card:
    """A card with the catalogue's words, of which ``more`` may replace some."""
    made = Card(
        identity(metric.name), words.title(metric.short), words.unit(metric.unit) or "no unit",
        metric.definition, metric.reading, metric.source, charts, remark, metric.name,
    )  # fmt: skip
    return replace(made, **more)


def loss_card(measured: Measured, names: tuple[str, ...]) -> Card:
    lines = [line(name, *measured.scalar(name)) for name in names]
    positive = all((one.values[one.finite] > 0).all() for one in lines)
    charts = lines_chart(lines, "training-loss", "loss", log=positive)
    return Card(
        "training-loss", "Loss", "as logged", "scalars that the training loop logged",
        "A smooth fall is healthy; compare the step of any spike with the maps below.",
        "scope.log", charts, _nothing(charts),
    )  # fmt: skip


def scalar_card(measured: Measured, name: str, place: int) -> Card:
    one = line(name, *measured.scalar(name))
    key = f"scalar-{place}"
    charts = lines_chart([one], key, name)
    return Card(
        key, name, "as logged", "a scalar that the training loop logged",
        "Read it beside the loss.", "scope.log", charts, _nothing(charts),
    )  # fmt: skip


def rate_card(measured: Measured) -> Card:
    """Learning rate by parameter group; groups that share a schedule are one line."""
    rates = measured.array("optimizer/lr")
    _, first = np.unique(rates, axis=1, return_index=True)
    steps = measured.run.steps
    lines = [
        line("learning rate" if len(first) == 1 else f"group {group}", steps, rates[:, group])
        for group in np.sort(first)
    ]
    charts = lines_chart(lines, "training-lr", "learning rate")
    return card(
        METRICS["optimizer/lr"], charts, _nothing(charts), id="training-lr", title="Learning rate"
    )


def gradient_card(measured: Measured) -> Card:
    one = line("gradient norm", measured.run.steps, measured.gradient_norm)
    charts = lines_chart([one], "training-gradient", "gradient norm", log=True)
    return Card(
        "training-gradient", "Global gradient norm", METRICS["gradient/norm"].unit,
        "square root of the sum of gradient/norm² over all parameters, each counted once",
        "Slow change is healthy; spikes that come before spikes of the loss ask for clipping or a "
        "lower learning rate.", METRICS["gradient/norm"].source, charts,
    )  # fmt: skip


def massive_card(measured: Measured) -> Card | None:
    found = massive(measured)
    if found is None:
        return None
    return card(
        METRICS["massive/value"], (massive_chart(found, "massive-profile"),),
        id="massive", title="Largest activations of every block",
        reading="Top 1 far above top 2, top 3 and the median, in the same channel from one block "
        "on, is a massive activation; a thousand times the median is the papers' threshold.",
    )  # fmt: skip


def learning_card(measured: Measured) -> Card | None:
    """Relative update of each block: which layers learn, which idle."""
    found = block_ratio(measured)
    if found is None or not np.isfinite(found[1]).any():
        return None
    depths, ratio = found
    names = tuple(f"{measured.noun} {depth}" for depth in depths)
    whole = Curve("all weights", "block", 0, depths, depths, names, noun=measured.noun)
    rows = measured.drawn
    blocks = Profile(LEARNING, rows.drawn, (Series(whole, ratio[rows.rows]),))
    chart = with_reference(
        profile_chart(blocks, "learning"), [(HEALTHY_UPDATE, "10⁻³, common with Adam")]
    )
    heat = map_chart(blocks, "learning-map")
    charts = (hold(chart, (HEALTHY_UPDATE / 2, HEALTHY_UPDATE * 2)), *((heat,) if heat else ()))
    return card(LEARNING, charts, id="learning", title=f"Which {measured.noun}s learn", name="")


def weibull_card(measured: Measured, metric: Metric) -> Card:
    """A Weibull metric; the shape is drawn with the half-normal line and the FFN band."""
    made = metric_card(measured, metric)
    if metric.short != "weibull_k" or not made.charts:
        return made
    if not bands_hold(protocol(measured.run)):
        return replace(made, id="weibull-k", title="Shape k")
    level = [(HALF_NORMAL, f"half-normal {HALF_NORMAL}")]
    drawn = with_reference(made.charts[0], level, BAND)
    drawn = hold(drawn, (BAND[0] - 0.02, HALF_NORMAL + 0.02))
    charts = (drawn, *made.charts[1:])
    reading = f"{made.reading} The tinted strip is the band of trained FFN matrices."
    return replace(made, id="weibull-k", title="Shape k", reading=reading, charts=charts)


def cost_card(measured: Measured) -> Card | None:
    cost = np.asarray(measured.run["clock/cost"].values)
    if not np.isfinite(cost).any():
        return None
    one = line("time added", measured.run.steps, cost * 1e3)
    charts = lines_chart([one], "cost", "ms per recorded step", log=True)
    return Card(
        "cost", "What dynscope cost", "ms per recorded step",
        "time that dynscope measured as its own on the training thread",
        "Level is healthy; the first rows include set-up. Record less often to make it smaller.",
        "clock/cost", charts,
    )  # fmt: skip


def hold(chart: Chart, span: tuple[float, float]) -> Chart:
    """``chart`` with a value axis that reaches over ``span``."""
    axis = chart.spec["layout"]["yaxis"]
    ends = np.log10(span) if axis.get("type") == "log" else span
    low, high = axis.get("range", ends)
    axis = axis | {"range": [min(low, float(ends[0])), max(high, float(ends[1]))]}
    spec = chart.spec | {"layout": chart.spec["layout"] | {"yaxis": axis}}
    return replace(chart, spec=spec)


def _nothing(charts: tuple[Chart, ...]) -> str:
    return "" if charts else "No finite value was logged."


def _reason(measured: Measured, metric: Metric) -> str:
    reasons = {gap.reason for gap in measured.run.coverage if gap.metric == metric.name}
    return f"Reason: {words.listing(sorted(reasons))}." if reasons else ""
