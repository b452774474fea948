"""The work of a sweep: read some tensors of a checkpoint, fit each, count each role's together."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import nan
from typing import Any, NamedTuple

from numpy.typing import NDArray

from dynscope import weibull
from dynscope.checkpoints import Checkpoint
from dynscope.errors import InputError
from dynscope.structure.layouts import Layout
from dynscope.weibull.fits import count_for
from dynscope.weibull.parameters import FIT_METRICS, fit_or_reason, fit_row

METRICS = (*FIT_METRICS, "weight/mean", "weight/rms", "weight/norm", "weight/absmax")
"""What is measured of each parameter, in the order of `Row.numbers`."""

UNREAD = (nan,) * len(METRICS)
"""The numbers of a parameter that could not be read."""


class Row(NamedTuple):
    """The numbers of one parameter; why some are missing, or "" where none are.

    ``reason`` is one of `dynscope.weibull.REASONS` where only the fit is missing.
    """

    numbers: tuple[float, ...]
    reason: str = ""


@dataclass(frozen=True)
class Wanted:
    """A tensor by its name in the file, with the parameter it is and the parts to fit besides.

    ``whole`` is False where only parts are asked for. ``pools`` are the names of the pools that
    matrices count in, by the names of these.
    """

    stored: str
    name: str
    whole: bool
    layout: Layout | None
    parts: frozenset[str]
    pools: dict[str, str]


@dataclass(frozen=True)
class Task:
    """Some tensors of one checkpoint of a series, and how to fit them."""

    number: int
    checkpoint: int
    source: Checkpoint
    wanted: tuple[Wanted, ...]
    method: str
    trim: str


@dataclass
class Weighed:
    """What a task found: rows by parameter, counted weights by pool."""

    task: int
    checkpoint: int
    rows: dict[str, Row] = field(default_factory=dict)
    pools: dict[str, bytes] = field(default_factory=dict)


def weigh(task: Task) -> Weighed:
    """Do a task. A tensor that cannot be read becomes a row without numbers, with the reason."""
    found = Weighed(task.number, task.checkpoint)
    together: dict[str, weibull.Histogram] = {}
    for wanted in task.wanted:
        try:
            for name, matrix in _matrices(wanted, task.source.read(wanted.stored)):
                histogram = count_for(matrix, task.method, task.trim)
                found.rows[name] = _row(histogram, matrix.ndim, task.method, task.trim)
                if (pool := wanted.pools.get(name)) is not None:
                    together[pool] = _merged(together.get(pool), histogram)
        except Exception as error:  # one tensor does not cost the others
            reason = str(error) if isinstance(error, InputError) else _told(error)
            lost = (name for name in _names(wanted) if name not in found.rows)
            found.rows |= {name: Row(UNREAD, reason) for name in lost}
    found.pools = {name: one.condensed().to_bytes() for name, one in together.items()}
    return found


def pooled(counts: Iterable[tuple[str, bytes]], method: str, trim: str) -> dict[str, Row]:
    """The rows of pools, from what the tasks counted of each; how it was divided does not matter."""
    together: dict[str, weibull.Histogram] = {}
    for name, packed in counts:
        together[name] = _merged(together.get(name), weibull.Histogram.from_bytes(packed))
    return {name: _row(one.condensed(), 2, method, trim) for name, one in together.items()}


def _merged(known: weibull.Histogram | None, more: weibull.Histogram) -> weibull.Histogram:
    return more if known is None else known + more


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:160]}".splitlines()[0]


def _names(wanted: Wanted) -> Iterator[str]:
    yield from ([wanted.name] if wanted.whole else [])
    yield from wanted.parts


def _matrices(wanted: Wanted, array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """The parameter and its parts, those that are wanted, each cut out when it is asked for."""
    if wanted.whole:
        yield wanted.name, array
    if wanted.layout is not None and wanted.parts:
        for label, _, part in wanted.layout.matrices(array):
            if (name := f"{wanted.name}[{label}]") in wanted.parts:
                yield name, part


def _row(histogram: weibull.Histogram, ndim: int, method: str, trim: str) -> Row:
    """The fit of a histogram beside the sums that were taken with it; a bias has no fit."""
    fit = fit_or_reason(histogram, weibull.NOT_A_MATRIX * (ndim < 2), method, trim)
    finite = histogram.finite
    if not finite:
        return Row((*fit_row(fit, histogram), nan, nan, nan, nan), fit.reason)
    norm = histogram.sum_squares**0.5
    sums = (histogram.sum / finite, norm / finite**0.5, norm, histogram.absmax)
    return Row((*fit_row(fit, histogram), *sums), fit.reason)
