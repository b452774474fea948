"""Trained weights on the page: role by role, beside published models, and by scale."""

from collections.abc import Iterator, Sequence
from math import isfinite

import numpy as np

from dynscope.analysis import saturation
from dynscope.analysis.by_role import RoleWeights, by_role, neighbours
from dynscope.analysis.published import PROTOCOL_ERROR, PUBLISHED, SOURCE, Neighbour
from dynscope.analysis.verdicts import ENOUGH
from dynscope.reports.drawing.axes import value_axis
from dynscope.reports.drawing.figures import layout, line_trace, training_chart
from dynscope.reports.elements import theme, words
from dynscope.reports.elements.charts import Card, Chart, Spec, Table
from dynscope.reports.numbers.measured import Measured
from dynscope.reports.numbers.summaries import line
from dynscope.reports.wording import weights

SCALE_SOURCE = "Weibull weight magnitudes, arXiv 2605.18898"


def role_table(measured: Measured) -> Table | None:
    """The shape by role at the last step at which weights were measured."""
    found = by_role(measured.run)
    if not found:
        return None
    notes = dict.fromkeys(one.verdict.note for one in found if one.verdict.note)
    head = (
        "role", "class", "matrices", "weights", "k of all", "median k", "below the band", "verdict",
    )  # fmt: skip
    rows = tuple(
        (
            weights.role(one),
            one.weight_class,
            words.integer(one.matrices),
            words.integer(one.weights),
            _with_error(one.k, one.k_stderr),
            _with_error(one.median_k, one.median_stderr),
            _below(one),
            one.verdict.word,
        )
        for one in found
    )
    remark = f"At step {words.integer(found[0].step)}. {_sentences(notes)}".strip()
    return Table("Shape k by role", head, rows, remark)


def _below(one: RoleWeights) -> str:
    if not one.verdict.reads_band:
        return ""
    clearly = f", {words.integer(len(one.clearly))} clearly" * (len(one.clearly) != one.below)
    return f"{words.integer(one.below)} of {words.integer(one.matrices)}{clearly}"


def published_card(measured: Measured) -> Card | None:
    """The medians of this run, over those of the published models."""
    found = by_role(measured.run)
    near = neighbours(found)
    if not near:
        return None
    told = [
        f"{one.model.name} ({one.distance:.4f} ± {one.uncertainty:.4f}, over {', '.join(one.roles)})"
        for one in near[:3]
    ]
    remark = f"Nearest, by root mean square difference of k: {'; '.join(told)}."
    if max(one.weights for one in found) < ENOUGH:
        remark += " With fewer than a million weights of each kind this is a rough guess."
    return Card(
        "weibull-published", "Beside published models", "no unit",
        "median k over the matrices of a kind, at the last step; the bar is 1.96 standard errors of "
        "the median",
        "Grey points are 12 trained models. Their k come from a binned protocol, which is known to "
        f"{PROTOCOL_ERROR} only: a distance below that says no more.",
        SOURCE, (_published_chart(found, near),), remark,
    )  # fmt: skip


def scale_card(measured: Measured) -> Card | None:
    """Lambda of the FFN matrices over the training, against what learning rate and decay give."""
    found = saturation.saturation(measured.run)
    if not found:
        return None
    lines, traces = [], []
    for one in found:
        label = f", group {one.group}" if len(found) > 1 else ""
        law = saturation.PUBLISHED_COEFFICIENT
        for name, values, colour in (
            (f"λ, median of FFN matrices{label}", one.lam, theme.PALETTE[2]),
            (f"{law} √(η/decay){label}", law * one.scale, theme.GREY),
        ):
            lines.append(line(name, one.steps, values))
            traces.append(line_trace(lines[-1], name, colour))
    charts = training_chart(lines, traces, "weibull-scale", "λ (weight units)", log=True)
    return Card(
        "weibull-scale", "Scale λ against training", "weight units",
        "median of weight/weibull_lambda over the FFN matrices of an optimizer group; η and the decay "
        "are optimizer/lr and optimizer/weight_decay; T/τ sums η times decay over the steps",
        "With decoupled decay (AdamW) weights settle near the grey line once T/τ has passed 1; far "
        "below that they still are what initialization and the first steps made them.",
        SCALE_SOURCE, charts, " ".join(_scale_told(found)),
    )  # fmt: skip


def scale_table(runs: Sequence[tuple[str, Measured]]) -> Table | None:
    """The end of every run, and the law through all of them."""
    found = [(letter, one) for letter, run in runs for one in saturation.saturation(run.run)]
    if not found:
        return None
    rows = tuple(
        (
            letter,
            str(one.group),
            words.number(float(one.peak_scale[-1])),
            words.number(float(one.forgotten[-1])),
            one.word,
            words.number(float(one.lam[-1])),
            words.number(float(one.lam[-1] / one.peak_scale[-1])),
        )
        for letter, one in found
    )
    x, y = (np.array(each) for each in zip(
        *((one.peak_scale[-1], one.lam[-1]) for _, one in found), strict=True
    ))  # fmt: skip
    head = ("run", "group", "√(η/decay)", "T/τ", "state", "λ of FFN", "λ / √(η/decay)")
    return Table("Scale λ against training", head, rows, _law_told(x, y))


def _scale_told(found: Sequence[saturation.Saturation]) -> Iterator[str]:
    for one in found:
        where = f"Group {one.group}: " if len(found) > 1 else ""
        coefficient = one.lam[-1] / one.peak_scale[-1]
        yield (
            f"{where}T/τ = {words.number(float(one.forgotten[-1]))} at the end ({one.word}); "
            f"λ = {words.number(float(one.lam[-1]))} is {words.number(float(coefficient))} √(η/decay) "
            "by the largest learning rate."
        )
    late = [one.forgotten >= saturation.APPROACHING for one in found]
    x = np.concatenate([one.scale[rows] for one, rows in zip(found, late, strict=True)])
    y = np.concatenate([one.lam[rows] for one, rows in zip(found, late, strict=True)])
    if len(x):
        yield f"From T/τ = {saturation.APPROACHING} on, by each step's own η: {_law_told(x, y)}"


def _law_told(x: saturation.Floats, y: saturation.Floats) -> str:
    law = saturation.scale_law(x, y)
    unknown = "√(η/decay) does not vary" if law.points > 2 else "it takes three points"
    r = f"r = {law.r:.2f}" if isfinite(law.r) else f"r is not known: {unknown}"
    return (
        f"λ = {words.number(law.coefficient)} √(η/decay) over {words.count(law.points, 'point')}, {r}; "
        f"the paper has {saturation.PUBLISHED_COEFFICIENT}, r = 0.94."
    )


def _published_chart(found: Sequence[RoleWeights], near: Sequence[Neighbour]) -> Chart:
    own = [one for one in found if any(one.role in near_by.roles for near_by in near)]
    own = [one for one in own if one.stack == own[0].stack]
    places = [(model, role) for model in PUBLISHED for role in model.k if _has(own, role)]
    grey = {
        "type": "scatter", "mode": "markers", "name": "published models",
        "x": [role for _, role in places], "y": [model.k[role] for model, role in places],
        "customdata": [model.name for model, _ in places],
        "marker": {"color": theme.GREY, "size": 7, "opacity": 0.6},
        "hovertemplate": "%{customdata}, %{x}: <b>%{y:.4f}</b>",
    }  # fmt: skip
    errors = [1.96 * one.median_stderr if isfinite(one.median_stderr) else 0 for one in own]
    mine = {
        "type": "scatter", "mode": "markers", "name": "this run",
        "x": [one.role for one in own], "y": [one.median_k for one in own],
        "error_y": {"type": "data", "array": errors, "color": theme.PALETTE[0]},
        "marker": {"color": theme.PALETTE[0], "size": 10, "symbol": "diamond"},
        "hovertemplate": "%{x}: <b>%{y:.4f}</b>",
    }  # fmt: skip
    values = [np.array(trace["y"]) for trace in (grey, mine)]
    x = {"type": "category", "categoryorder": "array",
         "categoryarray": [one.role for one in own], "title": {"text": "role"}}  # fmt: skip
    spec: Spec = {"data": [grey, mine], "layout": layout(x, value_axis("median k", False, values))}
    return Chart("weibull-published", "By role", spec)


def _has(own: Sequence[RoleWeights], role: str) -> bool:
    return any(one.role == role for one in own)


def _with_error(value: float, error: float) -> str:
    if not isfinite(value):
        return ""
    return f"{value:.4f} ± {error:.4f}" if isfinite(error) else f"{value:.4f}"


def _sentences(notes: dict[str, None]) -> str:
    parts = dict.fromkeys(part for note in notes for part in note.split("; "))
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)
