"""The page that lays runs over each other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from dynscope.analysis.by_role import protocol
from dynscope.analysis.verdicts import BAND, bands_hold
from dynscope.catalogue import METRICS, Metric
from dynscope.errors import InputError
from dynscope.reading.run import Run
from dynscope.reports.cards import metrics as cards
from dynscope.reports.cards import weights
from dynscope.reports.drawing import overlays
from dynscope.reports.drawing.figures import with_reference
from dynscope.reports.elements import words
from dynscope.reports.elements.charts import Card, Chart, Contents, Section, Table, Tile
from dynscope.reports.numbers import pairing
from dynscope.reports.numbers.measured import Measured
from dynscope.reports.numbers.pairing import Side
from dynscope.reports.numbers.summaries import Profile, line, profile
from dynscope.reports.page import Report
from dynscope.reports.single import DEPTH_SECTIONS, MOST_ROWS
from dynscope.reports.wording import contrast, facts

SAME = "No difference at any common layer and step."
PROFILES = 0.55  # of the page's bytes; the rest is for differences


def compare(
    runs: Sequence[Run],
    labels: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """The page of two or more ``runs``: each later one is drawn over, and against, the first.

    ``labels`` name them (their own names otherwise); the letters a, b, … follow their order.
    Raises `InputError` for fewer than two runs, too many, or another number of labels.
    """
    sides = _sides(runs, labels)
    relative = len({side.blocks for side in sides}) > 1
    metrics = pairing.common_metrics(sides)
    most = pairing.affordable(sides, 1 - PROFILES)
    sections = [_training(sides)]
    for group, title, lead in (*DEPTH_SECTIONS, *_LATER_SECTIONS):
        progress(title)
        chosen = [metric for metric in metrics if _section_of(metric) == group]
        made = [metric_card(sides, metric, most, relative) for metric in chosen]
        made.sort(key=lambda card: (-len(card.charts), card.name != "activation/variance"))
        sections.append(Section(group, title, lead, tuple(made)))
    sections.append(_massive(sides, relative))
    steps = [
        rows.drawn for one in sides for rows in (one.measured.drawn, one.measured.drawn_weights)
    ]
    return Report(
        Contents(
            title=words.listing([side.label for side in sides]),
            kicker="Comparison of training dynamics",
            badges=tuple(Tile(side.letter, side.label, side.measured.told.text, "", side.colour)
                         for side in sides),
            statements=tuple(contrast.statements(sides, _is_same(sections))),
            tiles=(),
            facts=(),
            sections=tuple(one for one in sections if one.cards),
            slider=np.unique(np.concatenate(steps)),
            tables=tuple(_tables(sides)),
            relative=relative,
            hero=_hero(sides, relative),
        )
    )  # fmt: skip


_LATER_SECTIONS = (
    ("update", "Updates", "How far each optimizer step moves the weights."),
    ("weight", "Weights", "The parameters themselves."),
    ("weibull", "Weibull shape", "How weight magnitudes are distributed, by class and depth."),
    ("own", "Other metrics", "Metrics of these runs' own."),
)
_KNOWN = {group for group, _, _ in DEPTH_SECTIONS} | {"update", "weight"}


def metric_card(sides: Sequence[Side], metric: Metric, most: int, relative: bool) -> Card:
    """One metric of all runs: curves laid over each other, and the difference from the first."""
    identity = cards.identity(metric.name)
    if metric.short.startswith("weibull") and contrast.methods_differ(sides):
        return cards.card(metric, (), "Not compared: the runs were fitted by different methods.")
    having = [side for side in sides if side.measured.has(metric.name)]
    profiles = _profiles(sides, metric)
    if not profiles:
        return cards.card(metric, (), "No value was recorded in any run.")
    drawn = overlays.overlay_chart(profiles, metric, f"{identity}-profile", relative)
    fitted_by = (protocol(side.measured.run) for side in having)
    if metric.name == "weight/weibull_k" and all(map(bands_hold, fitted_by)):
        drawn = with_reference(drawn, [(cards.HALF_NORMAL, "half-normal")], BAND)
    found = pairing.differences(sides, metric, most)
    heat = overlays.difference_chart(
        found, f"{identity}-difference", metric.axes[0] == "weight_step"
    )
    same = bool(found) and all(one.equal for one in found)
    remark = SAME if same else ""
    if len(having) < len(sides):
        remark = f"Only in {words.listing([side.letter for side in having])}."
    elif not found:
        remark = "No layer and step in common: nothing to subtract."
    return cards.card(metric, (drawn,) if heat is None or same else (drawn, heat), remark)


def _sides(runs: Sequence[Run], labels: Sequence[str] | None) -> tuple[Side, ...]:
    most = len(pairing.LETTERS)
    if not 2 <= len(runs) <= most:
        raise InputError(f"A comparison takes 2 to {most} runs, not {len(runs)}", exit_code=2)
    chosen = pairing.labels_of(runs) if labels is None else tuple(labels)
    if len(chosen) != len(runs):
        raise InputError(f"{len(chosen)} labels for {len(runs)} runs: give one each", exit_code=2)
    share = PROFILES / len(runs)
    return tuple(
        Side(place, label, Measured(run, share))
        for place, (run, label) in enumerate(zip(runs, chosen, strict=True))
    )


def _profiles(sides: Sequence[Side], metric: Metric) -> list[tuple[Side, Profile]]:
    """A metric over depth, of the runs that hold values of it."""
    having = [side for side in sides if side.measured.has(metric.name)]
    found = [(side, profile(side.measured, metric)) for side in having]
    return [(side, one) for side, one in found if one.series]


def _hero(sides: Sequence[Side], relative: bool) -> Chart | None:
    """What is seen first: the residual streams' variance over depth, moved by the slider."""
    metric = METRICS["activation/variance"]
    profiles = _profiles(sides, metric)
    if not profiles:
        return None
    return cards.as_hero(overlays.overlay_chart(profiles, metric, "hero", relative))


def _is_same(sections: Sequence[Section]) -> bool:
    """Whether everything over depth could be compared and nothing differs."""
    depth = [card for one in sections[1:] for card in one.cards if card.id != "massive"]
    compared = [card for card in depth if card.charts]
    return bool(compared) and all(card.remark == SAME for card in compared)


def _section_of(metric: Metric) -> str:
    if metric.short.startswith("weibull"):
        return "weibull"
    return metric.group if metric.group in _KNOWN else "own"


def _training(sides: Sequence[Side]) -> Section:
    names = dict.fromkeys(name for side in sides for name in side.measured.loss_names)
    made = []
    for place, name in enumerate(names):
        lines = [
            (side, line(name, *side.measured.scalar(name)))
            for side in sides if name in side.measured.run.scalar_names
        ]  # fmt: skip
        identity = f"training-loss{place or ''}"
        chart = overlays.lines_overlay(lines, identity, name, log=True)
        made.append(Card(identity, words.title(name), "as logged", "as the training loop logged it",
                         "Lower at equal step is better.", "scope.log", chart))  # fmt: skip
    rates = [
        (side, line("lr", side.measured.run.steps, side.measured.array("optimizer/lr")[:, 0]))
        for side in sides
        if side.measured.has("optimizer/lr") and side.measured.array("optimizer/lr").size
    ]
    if rates:
        chart = overlays.lines_overlay(rates, "training-lr", "learning rate")
        made.append(cards.card(METRICS["optimizer/lr"], chart, title="Learning rate",
                               reading="The first parameter group's schedule."))  # fmt: skip
    norms = [
        (side, line("norm", side.measured.run.steps, side.measured.gradient_norm))
        for side in sides if np.isfinite(side.measured.gradient_norm).any()
    ]  # fmt: skip
    if norms:
        chart = overlays.lines_overlay(norms, "training-gradient", "gradient norm", log=True)
        made.append(replace(cards.gradient_card(norms[0][0].measured), charts=chart))
    return Section("training", "Training", "All runs on one axis of steps.", tuple(made))


def _massive(sides: Sequence[Side], relative: bool) -> Section:
    chart = overlays.massive_overlay(sides, "massive-profile", relative)
    made = cards.card(METRICS["massive/value"], (chart,) if chart else (), id="massive",
                      title="Largest activation of every block")  # fmt: skip
    return Section("massive-activations", "Massive activations",
                   "The largest element of every block's output, with its channel and token.",
                   (made,) if chart else ())  # fmt: skip


def _tables(sides: Sequence[Side]) -> Iterator[Table]:
    head = ("", *(side.name for side in sides))
    known = [dict(facts.facts(side.measured)) for side in sides]
    names = dict.fromkeys(name for one in known for name in one)
    rows = tuple((name, *(one.get(name, "–") for one in known)) for name in names)
    differing = pairing.settings_that_differ([s.measured.run.metadata.config for s in sides])
    yield Table("Configuration, where it differs", head,
                tuple((key, *values) for key, values in differing.items()),
                "" if differing else "No entry differs.")  # fmt: skip
    yield Table("About these runs", head, rows)
    scales = weights.scale_table([(side.letter, side.measured) for side in sides])
    if scales is not None:
        yield scales
    alone = tuple(pairing.only_in(sides))
    remark = f"The first {MOST_ROWS} of {len(alone)}." if len(alone) > MOST_ROWS else ""
    if alone:
        yield Table("Not in every run", ("what", "name", "only in"), alone[:MOST_ROWS], remark)
