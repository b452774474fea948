"""Axes: which ticks, which range, straight or logarithmic."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynscope.reports import words
from dynscope.reports.curves import Curve

Axis = dict[str, Any]
Floats = NDArray[np.floating]

_MOST_TICKS = 12


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
    for depth in sorted(outside):
        values.append(depth)
        texts.append("emb" if depth < 0 else "end")
    low, high = min(values), max(last, *values)
    pad = 0.04 * (high - low) + 0.25
    return {
        "title": {"text": curves[0].noun if curves else "block"},
        "tickvals": values,
        "ticktext": texts,
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


def step_axis(log: Sequence[int] | NDArray[np.int64] = ()) -> Axis:
    """The axis of training steps; logarithmic where the steps to tick are given."""
    axis: Axis = {"title": {"text": "step"}, "exponentformat": "none", "separatethousands": True}
    if not len(log):
        return axis
    ticks = log_ticks(float(np.log10(max(log[0], 1))), float(np.log10(max(log[-1], 1))))
    return axis | {"type": "log"} | ticks


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
