"""The summary in words: what a run is, and what it did, from all of its recorded rows."""

from collections.abc import Iterator
from math import isfinite, nan

import numpy as np

from dynscope.analysis.depth import first_bad_layer, growth_law
from dynscope.reports.elements import words
from dynscope.reports.elements.charts import Statement, Tone
from dynscope.reports.elements.words import number
from dynscope.reports.numbers import plateau
from dynscope.reports.numbers.measured import Measured, block_ratio
from dynscope.reports.numbers.summaries import massive
from dynscope.reports.wording import facts, weights

IDLE = 0.1  # of the median block's relative update
LARGE_SHARE = 0.1  # of the energy, for three elements
FEWEST_BLOCKS = 4  # for a law
RISEN = 0.2  # of the last loss: this far above its lowest the loss has risen again
DEAR = 0.05  # share of the time that is worth a warning


def statements(measured: Measured) -> tuple[Statement, ...]:
    """The sentences of the summary, the most general first."""
    if not len(measured.run.steps):
        found = tuple(weights.statements(measured))
        return found or (Statement("This run holds no recorded step yet.", "warn"),)
    makers = (
        _loss,
        _growth,
        _gradients,
        _largest,
        _nonfinite,
        _learning,
        _angles,
        weights.verdicts,
        _cost,
    )
    return tuple(sentence for maker in makers for sentence in maker(measured))


def _loss(measured: Measured) -> Iterator[Statement]:
    for name in measured.loss_names[:1]:
        steps, values = measured.scalar(name)
        ends = facts.loss_ends(measured)
        if ends is not None:
            fell = ends[1] < ends[0]
            text = f"The {name} {'fell' if fell else 'rose'} from {number(ends[0])} to {number(ends[1])}"
            if len(values) == 1 or ends[0] == ends[1]:
                text = f"The {name} is {number(ends[1])}"
            lowest = int(np.nanargmin(values))
            if ends[1] - values[lowest] > RISEN * abs(ends[1]):
                text += f"; it was lowest, {number(values[lowest])}, at step {words.integer(steps[lowest])}"
            yield Statement(f"{text}.", "good" if fell else "", "training-loss")
        if not np.isfinite(values).all():
            first = words.integer(steps[int(np.argmin(np.isfinite(values)))])
            yield Statement(f"The {name} is not finite at step {first}.", "bad", "training-loss")


def variance_law(measured: Measured, row: int) -> str:
    """What the variance of the residual stream does over depth, "" with too little to say."""
    stream = measured.stream
    if stream is None or not measured.has("activation/variance"):
        return ""
    values = measured.array("activation/variance")[row, stream.columns]
    if np.isfinite(values).sum() < FEWEST_BLOCKS:
        return ""
    text = words.law(growth_law(stream.depths, values).text, stream.noun)
    if text.startswith("flat"):
        return f"is {text}"
    return f"shows {text}" if text.startswith("no ") else text


def _growth(measured: Measured) -> Iterator[Statement]:
    law, stream = variance_law(measured, -1), measured.stream
    if not law or stream is None:
        return
    text = f"The variance of the {stream.label} {law} at the last recorded step"
    first = variance_law(measured, 0)
    if first and first.split(" (")[0] != law.split(" (")[0]:
        text += f"; at the first, it {first}"
    tone: Tone = "warn" if "grows exponentially" in law else ""
    yield Statement(f"{text}.", tone, "activation-variance")


def _gradients(measured: Measured) -> Iterator[Statement]:
    stream = measured.stream
    if stream is None or not measured.has("activation_gradient/rms"):
        return
    row = measured.array("activation_gradient/rms")[-1, stream.columns]
    positive = np.flatnonzero(np.isfinite(row) & (row > 0))
    if len(positive) < 2:
        return
    low, high = positive[row[positive].argmin()], positive[row[positive].argmax()]
    factor = float(row[high] / row[low])
    text = f"Activation gradients are within a factor of {number(factor, 2)} over depth"
    if factor > 10:
        text = (
            f"Activation gradients differ by a factor of {number(factor, 2)} over depth, largest in "
            f"{stream.noun} {stream.depths[high]}, smallest in {stream.noun} {stream.depths[low]}"
        )
    yield Statement(f"{text}.", "warn" if factor > 100 else "", "activation_gradient-rms")


def _largest(measured: Measured) -> Iterator[Statement]:
    top = facts.largest(measured)
    if top is None:
        return
    text = f"The largest activation is {number(top.value)}, in {top.where}"
    if isfinite(top.ratio):
        text += f", {number(top.ratio)} times the median"
    found = massive(measured)
    one = plateau.plateau(found, -1) if found else None
    if one is None:
        is_massive = top.ratio >= plateau.TIMES_MEDIAN and top.value > plateau.MAGNITUDE
        text += ": a massive activation" if is_massive else ""
        yield Statement(f"{text}.", "warn" if is_massive else "", "massive")
        return
    writer, share = plateau.writer(measured, one), plateau.share(measured, one)
    text += f". It is a massive activation: at the last recorded step it stays in {one.where}"
    text += f", written by {writer}" if writer else ""
    if share > LARGE_SHARE:
        text += f". Three elements hold {words.percent(share)} of the stream's energy there"
    yield Statement(f"{text}.", "warn", "massive")


def _nonfinite(measured: Measured) -> Iterator[Statement]:
    total = facts.nonfinite_total(measured)
    if total is None:
        return
    if not total:
        yield Statement("No NaN and no infinity in any activation.", "good")
        return
    run = measured.run
    counts = measured.array("activation/nonfinite_count")
    place = first_bad_layer(run.steps, [site.depth for site in run.sites], counts)
    row = counts[int(np.flatnonzero(np.nan_to_num(counts).sum(axis=1))[0])]
    sites = [site.path or "the model" for site, bad in zip(run.sites, row, strict=True) if bad > 0]
    step = words.integer(place.step) if place else "?"
    yield Statement(
        f"{words.integer(total)} activations are NaN or infinite, first at step {step} in "
        f"{words.listing(sites)}.", "bad", "activation-nonfinite_count",
    )  # fmt: skip


def _learning(measured: Measured) -> Iterator[Statement]:
    """Which blocks learn and which idle, over the last quarter of the recorded steps."""
    found = block_ratio(measured)
    if found is None or np.isnan(found[1]).all():
        return
    (indices, ratio), noun = found, measured.noun
    late = ratio[-max(len(ratio) // 4, 1) :]
    typical = np.array(
        [np.median(c[np.isfinite(c)]) if np.isfinite(c).any() else nan for c in late.T]
    )
    if not (typical > 0).any():
        yield Statement(
            f"No {noun} moved its weights in the last recorded steps.", "warn", "learning"
        )
        return
    middle = float(np.nanmedian(typical))
    idle = [int(i) for i, pace in zip(indices, typical, strict=True) if pace < IDLE * middle]
    low, high = int(np.nanargmin(typical)), int(np.nanargmax(typical))
    if idle:
        yield Statement(
            f"{words.places(noun, idle).capitalize()} {'idles' if len(idle) == 1 else 'idle'}: relative "
            f"updates below a tenth of the median {noun}'s, {number(middle)}.", "warn", "learning",
        )  # fmt: skip
    elif len(indices) > 1:
        yield Statement(
            f"Every {noun} learns: relative updates lie between {number(typical[low])} ({noun} "
            f"{indices[low]}) and {number(typical[high])} ({noun} {indices[high]}) of the weights a "
            "step.", "good", "learning",
        )  # fmt: skip


def _angles(measured: Measured) -> Iterator[Statement]:
    stream = measured.stream
    if stream is None or not measured.has("activation/angular_distance"):
        return
    row = measured.array("activation/angular_distance")[-1, stream.columns]
    row = row[np.isfinite(row)]
    if len(row) < 4:
        return
    quarter = len(row) // 4
    early, late = float(row[:quarter].mean()), float(row[-quarter:].mean())
    first, last = "first", "last"
    if quarter > 1:
        first, last = f"first {quarter}", f"last {quarter}"
    turn = "turns" if quarter == 1 else "turn"
    text = (
        f"The {first} {words.plural(quarter, stream.noun)} {turn} the residual stream by "
        f"{number(early, 2)} half turns, the {last} by {number(late, 2)}"
    )
    faint = late < 0.25 * early
    if faint:
        text += ": deep blocks do little"
    yield Statement(f"{text}.", "warn" if faint else "", "activation-angular_distance")


def _cost(measured: Measured) -> Iterator[Statement]:
    share = facts.cost_share(measured)
    if isfinite(share):
        text = f"dynscope took {words.percent(share)} of the training time"
        yield Statement(f"{text}.", "warn" if share > DEAR else "", "cost")
