"""The page of one run: its sections in order."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from dynscope.catalogue import Metric
from dynscope.reading.run import Run
from dynscope.reports.cards import metrics as cards
from dynscope.reports.cards import weights
from dynscope.reports.elements import words
from dynscope.reports.elements.charts import Card, Contents, Section, Table, Tile
from dynscope.reports.numbers.measured import Measured
from dynscope.reports.page import Report
from dynscope.reports.wording import facts, overview

MOST_SCALARS = 12
MOST_ROWS = 200

# Groups of metrics with a section of their own, in the order of the page; the user's come last.
DEPTH_SECTIONS = (
    ("activation", "Forward", "Activations through depth: what each block passes on."),
    ("activation_gradient", "Backward",
     "Gradients with respect to activations: what comes back to each block."),
    ("gradient", "Gradients", "Parameter gradients as the optimizer applied them."),
)  # fmt: skip


def report(run: Run, progress: Callable[[str], None] = lambda _: None) -> Report:
    """The page of ``run``; ``progress`` is told the title of every section that is begun."""
    measured = Measured(run)
    forward, *backward = (_depth(*section) for section in DEPTH_SECTIONS)
    makers = (
        _training, forward, _massive, *backward, _updates, _weights, _weibull, _others, _cost,
    )  # fmt: skip
    sections = []
    for make in makers:
        section = make(measured)
        if section.cards or section.tables:
            progress(section.title)
            sections.append(section)
    metadata = run.metadata
    return Report(
        Contents(
            title=metadata.name or run.path.stem,
            kicker="Training dynamics",
            badges=_badges(measured),
            statements=overview.statements(measured),
            tiles=facts.tiles(measured),
            facts=facts.facts(measured),
            sections=tuple(sections),
            slider=np.union1d(measured.drawn.drawn, measured.drawn_weights.drawn),
            settings=metadata.config,
            hero=cards.hero(measured),
        )
    )


def _badges(measured: Measured) -> tuple[Tile, ...]:
    closed = measured.run.metadata.closed
    state = Tile("closed", "", "The run was closed.", "good")
    if not closed:
        state = Tile("not closed", "", "Still being written, or killed: rows may follow.", "warn")
    found = [state]
    told = measured.told
    if told.thinned:
        label = f"{words.integer(len(told.rows))} of {words.integer(len(told.steps))} steps drawn"
        found.append(Tile(label, "", told.text))
    return tuple(found)


def _training(measured: Measured) -> Section:
    losses = measured.loss_names
    found = [cards.loss_card(measured, losses)] if losses else []
    if measured.has("optimizer/lr") and measured.array("optimizer/lr").size:
        found.append(cards.rate_card(measured))
    if np.isfinite(measured.gradient_norm).any():
        found.append(cards.gradient_card(measured))
    others = [name for name in measured.run.scalar_names if name not in losses]
    found += [
        cards.scalar_card(measured, name, place) for place, name in enumerate(others[:MOST_SCALARS])
    ]
    lead = "The whole training on one axis."
    if len(others) > MOST_SCALARS:
        lead += f" Not drawn: {words.listing(others[MOST_SCALARS:], 20)}."
    return Section("training", "Training", lead, tuple(found))


def _depth(group: str, title: str, lead: str) -> Callable[[Measured], Section]:
    def make(measured: Measured) -> Section:
        told = f"{lead} {_twins(measured)}".strip() if group == "activation" else lead
        return Section(group, title, told, _metric_cards(measured, _of(measured, group)))

    return make


def _twins(measured: Measured) -> str:
    """Why a sublayer is not drawn, "" where all are."""
    if not measured.twins:
        return ""
    labels = words.listing([curve.label for curve in measured.twins])
    return (
        f"Not drawn apart: {labels}, whose module adds the residual and normalizes inside, so that "
        "what it puts out is the residual stream itself."
    )


def _massive(measured: Measured) -> Section:
    found = cards.massive_card(measured)
    lead = "The three largest elements of every block's output, with the channel and the token."
    return Section("massive-activations", "Massive activations", lead, (found,) if found else ())


def _updates(measured: Measured) -> Section:
    block = cards.learning_card(measured)
    found = ((block,) if block else ()) + _metric_cards(measured, _of(measured, "update"))
    return Section("update", "Updates", "How far each optimizer step moves the weights.", found)


def _weights(measured: Measured) -> Section:
    plain = [m for m in _of(measured, "weight") if not m.short.startswith("weibull")]
    found = _metric_cards(measured, plain)
    return Section(
        "weight", "Weights", "The parameters themselves, on a schedule of their own.", found
    )


def _weibull(measured: Measured) -> Section:
    fits = [m for m in _of(measured, "weight") if m.short.startswith("weibull")]
    found = tuple(cards.weibull_card(measured, metric) for metric in _told(measured, fits))
    lead = (
        "How weight magnitudes are distributed, by weight class and depth. Gaussian "
        "initialization lies on the half-normal line; training moves query and key matrices most."
    )
    more = (weights.published_card(measured), weights.scale_card(measured))
    table = weights.role_table(measured)
    found = (*found[:1], *(card for card in more if card), *found[1:])
    return Section("weibull", "Weibull shape", lead, found, (table,) if table else ())


def _others(measured: Measured) -> Section:
    known = {group for group, _, _ in DEPTH_SECTIONS} | {"update", "weight", "massive"}
    own = [metric for metric in measured.metrics if metric.group not in known]
    return Section(
        "own", "Other metrics", "Metrics of this run's own.", _metric_cards(measured, own)
    )


def _cost(measured: Measured) -> Section:
    found = cards.cost_card(measured)
    lead = f"{measured.told.text} What is missing is blank in the charts, and said here."
    tables = (_coverage(measured), _events(measured))
    return Section(
        "cost-and-coverage", "Cost and coverage", lead, (found,) if found else (), tables
    )


def _coverage(measured: Measured) -> Table:
    counted = Counter((gap.kind, gap.metric, gap.reason) for gap in measured.run.coverage)
    first: dict[tuple[str, str, str], list[str]] = {}
    for gap in measured.run.coverage:
        first.setdefault((gap.kind, gap.metric, gap.reason), []).append(gap.path or "everything")
    rows = tuple(
        (kind, metric or "all", words.listing(list(dict.fromkeys(first[kind, metric, reason])), 3),
         words.integer(many), reason)
        for (kind, metric, reason), many in counted.most_common(MOST_ROWS)
    )  # fmt: skip
    told = {gap.metric for gap in measured.run.coverage}
    never = [m.name for m in measured.metrics if m.name not in told and not _told(measured, [m])]
    remark = "" if rows or never else "Nothing is known to be missing."
    if never:
        remark = f"Never measured in this run: {words.listing(never, 20)}."
    return Table(
        "Not recorded, and why", ("kind", "metric", "where", "times", "reason"), rows, remark
    )


def _events(measured: Measured) -> Table:
    events = measured.run.events
    rows = tuple((words.integer(one.step), one.kind, one.message) for one in events[:MOST_ROWS])
    remark = f"The first {MOST_ROWS} of {len(events)}." if len(events) > MOST_ROWS else ""
    return Table("Events", ("step", "kind", "message"), rows, remark or ("" if rows else "None."))


def _of(measured: Measured, group: str) -> list[Metric]:
    return [metric for metric in measured.metrics if metric.group == group]


def _told(measured: Measured, metrics: Sequence[Metric]) -> list[Metric]:
    """Metrics with something to draw, or with a reason why there is nothing at a place."""
    missing = {gap.metric for gap in measured.run.coverage if gap.path}
    return [
        metric for metric in metrics
        if metric.name in missing or not np.isnan(measured.array(metric.name)).all()
    ]  # fmt: skip


def _metric_cards(measured: Measured, metrics: Sequence[Metric]) -> tuple[Card, ...]:
    """Cards with a map first: what is the same everywhere comes last, without one."""
    ordered = sorted(metrics, key=lambda metric: metric.short != "variance")
    made = (cards.metric_card(measured, metric) for metric in _told(measured, ordered))
    return tuple(sorted(made, key=lambda card: -len(card.charts)))
