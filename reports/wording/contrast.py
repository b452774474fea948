"""The summary of a comparison in words: what differs between the runs, from all recorded rows."""

from collections.abc import Iterator, Sequence
from math import hypot

import numpy as np

from dynscope.analysis.by_role import by_role, protocol
from dynscope.analysis.depth import first_divergence
from dynscope.catalogue import METRICS
from dynscope.reports.elements import words
from dynscope.reports.elements.charts import Statement
from dynscope.reports.elements.words import number
from dynscope.reports.numbers import pairing
from dynscope.reports.numbers.pairing import Side
from dynscope.reports.wording import facts, overview
from dynscope.weibull import comparable

EVERY_ROW = 10**9


def statements(sides: Sequence[Side], same: bool) -> Iterator[Statement]:
    """The sentences of the summary; ``same`` is whether nothing that was compared differs."""
    if same:
        yield Statement("No value at any common layer and step differs.", "good")
    if methods_differ(sides):
        told = words.listing([f"{protocol(side.measured.run)} ({side.letter})" for side in sides])
        yield Statement(
            f"Weibull fits are not compared: they were made by {told}.", "warn", "weibull-k"
        )
    else:
        yield from _shapes(sides)
    differing = pairing.settings_that_differ([s.measured.run.metadata.config for s in sides])
    if differing:
        parts = [f"{key} ({' / '.join(values)})" for key, values in differing.items()]
        yield Statement(f"The configurations differ in {words.listing(parts, 6)}.")
    else:
        yield Statement("The configurations are equal.")
    yield from _about_each(sides)
    yield from _divergence(sides)
    open_runs = [side.letter for side in sides if not side.measured.run.metadata.closed]
    if open_runs:
        yield Statement(f"Not closed, rows may follow: {words.listing(open_runs)}.", "warn")
    if len({side.blocks for side in sides}) > 1:
        counts = words.listing([f"{side.letter} {side.blocks}" for side in sides])
        yield Statement(
            f"Depths: {counts}. Curves are drawn over relative depth; differences are of layers "
            "with the same index."
        )


def methods_differ(sides: Sequence[Side]) -> bool:
    return not comparable(*(protocol(side.measured.run) for side in sides))


def _shapes(sides: Sequence[Side]) -> Iterator[Statement]:
    """How far the median k of each role lies from the first run's, of checkpoints."""
    if any(s.measured.run.metadata.settings.get("source") != "checkpoints" for s in sides):
        return
    first, *others = [{(r.role, r.stack): r for r in by_role(s.measured.run)} for s in sides]
    for side, rows in zip(sides[1:], others, strict=True):
        parts = [
            f"{row.role} {row.median_k - first[key].median_k:+.4f} "
            f"± {hypot(row.median_stderr, first[key].median_stderr):.4f}"
            for key, row in rows.items()
            if key in first
        ]
        if parts:
            text = f"Median Weibull k, {side.letter} minus {sides[0].letter}: {words.listing(parts, 8)}."
            yield Statement(text, "", "weibull-k")


def _about_each(sides: Sequence[Side]) -> Iterator[Statement]:
    """What is known of every run, set side by side."""
    losses = [(s, ends) for s in sides if (ends := facts.loss_ends(s.measured)) is not None]
    if losses:
        parts = [
            f"{number(last)} at step {words.integer(step)} ({side.letter})"
            for side, (_, last, step) in losses
        ]
        yield Statement(f"Last loss: {words.listing(parts, 8)}.", "", "training-loss")
    laws = [(s, law) for s in sides if (law := overview.variance_law(s.measured, -1))]
    if laws:
        parts = [f"{law} in {side.letter}" for side, law in laws]
        stream = sides[0].measured.stream
        what = stream.label if stream is not None else "layers"
        yield Statement(
            f"At the end the variance of the {what} {words.listing(parts, 8)}.",
            "",
            "activation-variance",
        )
    tops = [(s, top) for s in sides if (top := facts.largest(s.measured)) is not None]
    if tops:
        parts = [f"{number(top.value)} in {top.place} ({side.letter})" for side, top in tops]
        yield Statement(f"Largest activation: {words.listing(parts, 8)}.", "", "massive")


def _divergence(sides: Sequence[Side]) -> Iterator[Statement]:
    """The first step and block at which a later run leaves the first."""
    first, *others = sides
    stream = first.measured.stream
    if stream is None:
        return
    for other in others:
        pair = f"{other.letter} and {first.letter}"
        for one in pairing.differences((first, other), METRICS["activation/rms"], EVERY_ROW):
            if one.series.curve.key != stream.key:
                continue
            ratio = 10.0**one.series.values
            depths = one.series.curve.depths
            place = first_divergence(one.steps, depths, np.ones_like(ratio), ratio)
            if (ratio == 1).all():
                text = f"{pair} are equal in the {stream.label} at every common step"
            elif place is None:
                text = f"{pair} stay within 10 % of each other in the {stream.label} (rms)"
            else:
                text = (
                    f"{pair} differ by more than 10 % in the {stream.label} (rms) first at step "
                    f"{words.integer(place.step)}, in {stream.noun} {place.depth}"
                )
            yield Statement(f"{text}.", "", "activation-rms")
