"""Axes: which ticks, which range, straight or logarithmic."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynscope.reports.elements import words
from dynscope.reports.numbers.curves import Curve

Axis = dict[str, Any]
Floats = NDArray[np.floating]

_MOST_TICKS = 12
# Where step 0 stands on a logarithmic axis: before 1, and below one half, so that it rounds to 0.
BEFORE_FIRST = 0.49


def depth_axis(curves: Sequence[Curve]) -> Axis:
    """Block numbers, with room for what stands before the first block and after the last."""
    inside = [curve.depths for curve in curves if curve.joined]
    last = int(max((depths.max() for depths in inside), default=0))
    every = next(
        step for step in (1, 2, 3, 4, 5, 6, 8, 10, 20, 50, 100, 10**9)
        if last / step < _MOST_TICKS
    )  # fmt: skip
    values = list(range(0, last + 1, every))
    texts = [str(value) for value in values]
    outside = {int(depth) for curve in curves if not curve.joined for depth in curve.depths}
    # A line lower, where the numbers are too close for a word between them.
    lower = "\u00a0<br>" if every > 1 else ""
    for depth in sorted(outside):
        values.append(depth)
        texts.append(lower + ("emb" if depth < 0 else "end"))
    low, high = min(values), max(last, *values)
    pad = 0.04 * (high - low) + 0.25
    return {
        "title": {"text": curves[0].noun if curves else "block"},
        "tickvals": values,
        "ticktext": texts,
        "tickangle": 0,
        "range": [low - pad, high + pad],
        "zeroline": False,
    }


def value_axis(title: str, log: bool, values: Iterable[ArrayLike] = ()) -> Axis:
    """An axis that holds ``values`` at every step, so that it stays put while the step moves."""
    axis: Axis = {"title": {"text": title}, "zeroline": not log}
    if log:
        axis |= {"type": "log", "exponentformat": "power"}
    return axis | reach(values, log)


def reach(values: Iterable[ArrayLike], log: bool) -> Axis:
    """Range (and ticks, where logarithmic) of an axis around ``values``; {} where none is finite."""
    span = extent(values, positive=log)
    if span is None:
        return {}
    low, high = (float(np.log10(end)) if log else end for end in span)
    pad = 0.06 * (high - low) or (0.1 if log else 0.1 * abs(high) or 1.0)
    low, high = low - pad, high + pad
    return {"range": [low, high]} | (log_ticks(low, high) if log else {})


def step_axis(steps: ArrayLike = (), log: bool = False) -> Axis:
    """The axis of the training ``steps``, with ticks at whole steps only.

    A logarithmic one has them at the steps themselves, which stand at `log_places`.
    """
    axis: Axis = {"title": {"text": "step"}, "exponentformat": "none", "separatethousands": True}
    every = np.unique(np.asarray(steps, np.int64))
    if not every.size:
        return axis
    if log:
        places = log_places(every)
        kept = _apart(np.log10(places))
        return axis | {"type": "log"} | _ticks(places[kept], every[kept])
    if every[-1] - every[0] < _MOST_TICKS:
        whole = np.arange(every[0], every[-1] + 1)
        return axis | _ticks(whole, whole)
    return axis


def log_places(steps: ArrayLike) -> Floats:
    """Where ``steps`` stand on a logarithmic axis: 0 before 1, the others where they are."""
    return np.maximum(np.asarray(steps, np.float64), BEFORE_FIRST)


def _ticks(places: NDArray[Any], steps: NDArray[np.int64]) -> Axis:
    texts = [words.integer(int(step)) for step in steps]
    return {"tickmode": "array", "tickvals": places.tolist(), "ticktext": texts}


def _apart(places: Floats) -> list[int]:
    """Indices of ascending places that are far enough from one another for a label each."""
    kept = [0]
    for index, place in enumerate(places):
        if place - places[kept[-1]] > (places[-1] - places[0]) / 9:
            kept.append(index)
    return kept


def extent(values: Iterable[ArrayLike], positive: bool = False) -> tuple[float, float] | None:
    """Smallest and largest finite (and positive) value of all arrays, None without any."""
    lows, highs = [], []
    for array in values:
        part = np.asarray(array, np.float64)
        part = part[np.isfinite(part) & ((part > 0) if positive else True)]
        if part.size:
            lows.append(part.min())
            highs.append(part.max())
    return (float(min(lows)), float(max(highs))) if lows else None


def log_ticks(low: float, high: float, logarithms: bool = False) -> Axis:
    """Ticks from ``low`` to ``high`` (base-10 logarithms) in plain numbers: 1, 2, 5, 10 or decades.

    With ``logarithms`` they stand at their logarithms, as on a colour bar.
    """
    decades = np.arange(np.floor(low), np.ceil(high) + 1, dtype=np.float64)
    ticks = decades[:: int(np.ceil(len(decades) / _MOST_TICKS))]
    for leads in ((1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        if _inside(ticks, low, high) >= 4:
            break
        ticks = np.concatenate([decades + np.log10(lead) for lead in leads])
    if _inside(ticks, low, high) < 2:
        ticks = np.log10(np.linspace(10**low, 10**high, 7)[1:-1:2])
    ticks = np.sort(ticks[(ticks >= low) & (ticks <= high)])
    ticks = ticks[:: int(np.ceil(len(ticks) / _MOST_TICKS)) or 1]
    texts = [words.number(float(10**tick), 3) for tick in ticks]
    places = ticks if logarithms else 10.0**ticks
    return {"tickmode": "array", "tickvals": places.tolist(), "ticktext": texts}


def _inside(ticks: Floats, low: float, high: float) -> int:
    return int(((ticks >= low) & (ticks <= high)).sum())
