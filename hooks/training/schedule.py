"""When to record: plain callables ``step -> bool``, with steps counted from 1."""

import math
from collections.abc import Callable
from numbers import Integral

from dynscope.errors import InputError

Schedule = Callable[[int], bool]
Spec = int | str | Schedule


def every(interval: int) -> Schedule:
    """Step 1 and every multiple of ``interval``."""
    return lambda step: step == 1 or step % interval == 0


def log_spaced(per_octave: int = 2) -> Schedule:
    """Steps at equal distances on a logarithmic axis: with 2 per octave 1, 2, 3, 4, 6, 8, 11, 16."""

    def due(step: int) -> bool:
        if step < 1:
            return False
        nearest = round(per_octave * math.log2(step))
        return any(round(2 ** (i / per_octave)) == step for i in range(nearest - 1, nearest + 2))

    return due


def schedule(spec: Spec, argument: str = "every") -> Schedule:
    """The schedule that ``spec`` names: an interval, ``"log"``, or a callable as it is.

    Raises `InputError`, naming ``argument``, for anything else.
    """
    if callable(spec):
        return spec
    if spec == "log":
        return log_spaced()
    if isinstance(spec, Integral) and not isinstance(spec, bool) and spec >= 1:
        return every(int(spec))  # numpy's integers too
    raise InputError(
        f"{argument}={spec!r} is no schedule: give an interval of at least 1, "
        'the word "log", or a function step -> bool'
    )


def describe(spec: Spec) -> str:
    """A few words for a summary line."""
    if isinstance(spec, Integral):
        return "every step" if spec == 1 else f"every {spec} steps"
    return "at log-spaced steps" if spec == "log" else "on a schedule of yours"
