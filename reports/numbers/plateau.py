"""A massive activation along the depth: where it begins, where it ends, who writes it.

Massive is what Sun et al. (arXiv 2402.17762) call so: a magnitude above 100 and a thousand times the
median of its hidden state.
"""

from dataclasses import dataclass

import numpy as np

from dynscope.reports.elements import words
from dynscope.reports.numbers.measured import Measured
from dynscope.reports.numbers.summaries import Massive

MAGNITUDE = 100.0
TIMES_MEDIAN = 1000.0


@dataclass(frozen=True)
class Plateau:
    """Blocks ``first`` to ``last``, whose largest element is massive and in one channel.

    ``token`` is -1 where the blocks do not agree on it; ``value`` and ``ratio`` to the median are
    those of the largest; ``open_end`` says that there is no block after the last.
    """

    first: int
    last: int
    channel: int
    token: int
    value: float
    ratio: float
    noun: str
    open_end: bool

    @property
    def where(self) -> str:
        place = f"channel {self.channel}"
        if self.token >= 0:
            place += f" of token {self.token}"
        if self.first == self.last:
            return f"{place} in {self.noun} {self.first}"
        until = "on" if self.open_end else f"to {self.noun} {self.last}"
        return f"{place} from {self.noun} {self.first} {until}"

    @property
    def text(self) -> str:
        return (
            f"A massive activation in {self.where}: up to {words.number(self.value)}, "
            f"{words.number(self.ratio)} times the median"
        )


def plateau(found: Massive, row: int) -> Plateau | None:
    """The massive activation of a drawn row, around the largest element; None without one."""
    if found.median is None:
        return None
    top, channel, token = (
        part[row, :, 0] for part in (found.magnitude, found.channel, found.token)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(found.median[row] > 0, top / found.median[row], np.nan)
    massive = (top > MAGNITUDE) & (ratio >= TIMES_MEDIAN)
    if not massive.any():
        return None
    peak = int(np.where(massive, top, -np.inf).argmax())
    alike = massive & (channel == channel[peak])
    breaks = np.flatnonzero(~alike)
    start = int(breaks[breaks < peak].max(initial=-1)) + 1
    stop = int(breaks[breaks > peak].min(initial=len(alike)))
    tokens = set(token[start:stop].tolist())
    depths = found.curve.depths
    return Plateau(
        first=int(depths[start]),
        last=int(depths[stop - 1]),
        channel=int(channel[peak]),
        token=int(tokens.pop()) if len(tokens) == 1 else -1,
        value=float(top[peak]),
        ratio=float(ratio[peak]),
        noun=found.curve.noun,
        open_end=stop == len(alike),
    )


def notes(found: Massive) -> tuple[str, ...]:
    """A sentence for every drawn step, empty where nothing is massive."""
    every = (plateau(found, row) for row in range(len(found.steps)))
    return tuple(f"{one.text}." if one else "" for one in every)


def writer(measured: Measured, one: Plateau) -> str:
    """The sublayer of the first block that put most of it there at the last step, "" if unclear."""
    sites = measured.run.sites
    values, channels = (
        measured.array(f"massive/{name}")[-1, :, 0] for name in ("value", "channel")
    )
    for column, site in enumerate(sites):
        inside = site.role in ("attention", "ffn", "mixer") and site.depth == one.first
        if inside and channels[column] == one.channel and abs(values[column]) > one.value / 2:
            return f"the {words.role(site.role)} of {one.noun} {one.first}"
    return ""


def share(measured: Measured, one: Plateau) -> float:
    """Energy of the three largest elements over that of all, in the first block at the last step."""
    stream = measured.stream
    if stream is None or not (measured.has("activation/rms") and measured.has("activation/count")):
        return float("nan")
    column = stream.columns[int(np.flatnonzero(stream.depths == one.first)[0])]
    largest = measured.array("massive/value")[-1, column].astype(np.float64)
    rms = float(measured.array("activation/rms")[-1, column])
    count = float(measured.array("activation/count")[-1, column])
    return float(np.nansum(largest**2)) / (rms**2 * count)
