"""What is said of trained weights: verdicts by role, and the nearest published model."""

from collections.abc import Iterator

from dynscope.analysis.by_role import RoleWeights, by_role, neighbours
from dynscope.analysis.verdicts import BAND, stored
from dynscope.reports.elements import words
from dynscope.reports.elements.charts import Statement
from dynscope.reports.numbers.measured import Measured
from dynscope.site import wholes


def statements(measured: Measured) -> Iterator[Statement]:
    """What is to be said of weights alone, as of checkpoints: by verdict, then by neighbour."""
    found = by_role(measured.run)
    if not found:
        return
    steps = measured.run.weight_steps
    whole = wholes(measured.run.parameters)
    total = words.parameters(sum(one.numel for one in whole))
    text = f"{words.count(len(steps), 'checkpoint')} of {words.count(len(whole), 'tensor')}, {total} weights"
    quantized = str(measured.run.metadata.settings.get("quantized", ""))
    note = stored(quantized)
    yield Statement(f"{text}; {note}." if note else f"{text}.", "warn" if note else "")
    yield from verdicts(measured)
    near = neighbours(found)
    if near:
        nearest = f"{near[0].model.name}, {near[0].distance:.4f} ± {near[0].uncertainty:.4f} away"
        yield Statement(f"Nearest published model: {nearest}.", "", "weibull-published")


def verdicts(measured: Measured) -> Iterator[Statement]:
    """One sentence for each verdict, with the roles that it holds of."""
    found = by_role(measured.run)
    steps = measured.run.weight_steps
    told: dict[str, list[str]] = {}
    for one in found:
        told.setdefault(one.verdict.word, []).append(f"{role(one)} ({_places(one, measured.noun)})")
    for word, roles in told.items():
        at = "" if len(steps) == 1 else f" at step {words.integer(found[0].step)}"
        text = f"Weibull shape, median k of {words.listing(roles, 8)}{at}: {word}."
        yield Statement(text, "", "weibull-k")


def _places(one: RoleWeights, noun: str) -> str:
    """The median, and where matrices are below the band."""
    text = f"{one.median_k:.3f}"
    depths = sorted(set(one.clearly))
    if not one.verdict.reads_band:
        return text
    if one.below == one.matrices > 1:
        return f"{text}, all {words.integer(one.matrices)} below {BAND[0]}"
    if not depths:
        return text
    return f"{text}, below {BAND[0]} in {words.places(noun, depths, of=one.matrices)}"


def role(one: RoleWeights) -> str:
    """The role's name, with its stack where there are several."""
    return f"{one.role} (stack {one.stack})" if one.stack else one.role
