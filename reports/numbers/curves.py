"""Which columns of a metric make one curve over depth: layers alike, one per block.

Sites and parameters are grouped by stack, role and name with the numbers taken out, so that
``h.0.attn.q.weight``, ``h.1.attn.q.weight``, … are one curve. Nothing is averaged. Of hundreds of
layers of one kind in every block, as experts are, the lowest, the median and the highest are curves.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynscope.reports.elements import words
from dynscope.site import POOLED, ROLES, Parameter, Site

Floats = NDArray[np.floating]

MOST_ALIKE = 16
"""Curves of one kind beyond which only their median and their extremes are drawn."""

_AMONG: dict[str, Callable[..., Floats]] = {
    "median": np.nanmedian, "lowest": np.nanmin, "highest": np.nanmax,
}  # fmt: skip
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Layer(NamedTuple):
    """A site or a parameter, as a column of a metric."""

    column: int
    name: str
    role: str
    stack: int
    depth: int
    minor: bool
    stream: bool = False  # of several residual streams, the one that its stack counts


@dataclass(frozen=True)
class Curve:
    """Columns of one kind of layer in order of depth (D of them).

    ``minor`` curves (vectors) are drawn only when asked for; layers outside the blocks are not
    ``joined``: they are points before the first and after the last block. ``noun`` is what a depth
    counts: blocks, or layers in the order of calls.

    Of a crowd ``columns`` is (D, most layers of one depth), filled up with -1, and ``among`` says
    which of them the curve shows: their "median", "lowest" or "highest".
    """

    label: str
    role: str
    stack: int
    columns: NDArray[np.int64]
    depths: NDArray[np.int64]
    names: tuple[str, ...]
    minor: bool = False
    joined: bool = True
    noun: str = "block"
    among: str = ""

    def values(self, rows: Floats) -> Floats:
        """The values (steps, D) of rows of a metric, (steps, sites or parameters)."""
        if not self.among:
            return rows[:, self.columns]
        found = np.where(self.columns < 0, np.nan, rows[:, self.columns])
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # all are NaN
            return np.asarray(_AMONG[self.among](found, axis=2), np.float32)

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes two runs' curves the same curve."""
        return (self.label, self.role, self.stack)


def noun_of(sites: Sequence[Site]) -> str:
    """What the depths of a model count."""
    return "block" if any(site.role == "block" for site in sites) else "layer"


def site_curves(sites: Sequence[Site]) -> tuple[Curve, ...]:
    """Curves of a site metric; without any block the layers make one curve, in call order."""
    layers = [
        Layer(i, site.module, site.role, site.stack, site.depth, False, site.module != site.path)
        for i, site in enumerate(sites)
    ]
    placed = [layer for layer in layers if layer.depth >= 0]
    noun = noun_of(sites)
    one_stack = len({layer.stack for layer in placed}) == 1
    if one_stack and noun == "layer" and _distinct(placed):
        outside = [layer for layer in layers if layer.depth < 0]
        found = (_curve("layers in call order", placed), *_outside(outside, placed, noun))
    else:
        found = _curves(layers, noun)
    return tuple(replace(curve, noun=noun) for curve in found)


def parameter_curves(parameters: Sequence[Parameter], noun: str = "block") -> tuple[Curve, ...]:
    """Curves of a parameter metric; biases, gains and other vectors are minor, pools are no layers.

    Without blocks, one curve for each role and kind (weight, bias) in call order.
    """
    layers = [
        Layer(i, one.name, one.role, one.stack, one.depth, len(one.shape) < 2)
        for i, one in enumerate(parameters)
        if one.part_of != POOLED
    ]
    kind = _kind if noun == "layer" else _unnumbered
    return tuple(replace(curve, noun=noun) for curve in _curves(layers, noun, kind))


def _unnumbered(name: str) -> str:
    return _NUMBER.sub("*", name)


def _kind(name: str) -> str:
    return name.rpartition(".")[-1]


def _curves(
    layers: Sequence[Layer], noun: str, kind: Callable[[str], str] = _unnumbered
) -> tuple[Curve, ...]:
    placed = [layer for layer in layers if layer.depth >= 0]
    outside = [layer for layer in layers if layer.depth < 0]
    alike = list(_alike(placed, kind))
    labels = _labels(alike, kind)
    found = [
        curve
        for label, group in zip(labels, alike, strict=True)
        for curve in ((_curve(label, group),) if _distinct(group) else _crowd(label, group))
    ]
    found.sort(key=lambda curve: (curve.minor, curve.stack, _rank(curve.role)))
    if not found and outside:
        return (_in_order(outside),)
    return (*found, *_outside(outside, placed, noun))


def _alike(layers: Sequence[Layer], kind: Callable[[str], str]) -> Iterable[list[Layer]]:
    """Layers of one ``kind`` by their names; told further apart where depths repeat, unless a crowd."""
    for group in _by(layers, kind).values():
        parts = [group] if _distinct(group) else list(_apart(group))
        yield from parts if len(parts) <= MOST_ALIKE else [group]


def _apart(layers: Sequence[Layer]) -> Iterable[list[Layer]]:
    for part in _by(layers, lambda name: _NUMBER.sub("*", name, count=1)).values():
        yield from [part] if _distinct(part) else ([layer] for layer in part)


def _by(layers: Iterable[Layer], template: Callable[[str], str]) -> dict[object, list[Layer]]:
    found: dict[object, list[Layer]] = {}
    for layer in layers:
        key = (layer.stack, layer.role, layer.minor, template(layer.name))
        found.setdefault(key, []).append(layer)
    return found


def _distinct(layers: Sequence[Layer]) -> bool:
    places = [(layer.stack, layer.depth) for layer in layers]
    return len(set(places)) == len(places)


def _labels(alike: Sequence[Sequence[Layer]], kind: Callable[[str], str]) -> list[str]:
    """The role where that is enough to tell a curve, the tail of the name where it is not."""
    short = [_short(layers[0]) for layers in alike]
    return [
        label if short.count(label) == 1 else _long(layers, kind)
        for label, layers in zip(short, alike, strict=True)
    ]


def _long(layers: Sequence[Layer], kind: Callable[[str], str]) -> str:
    first = layers[0]
    if kind is _kind and len(layers) > 1:
        return f"{_stack(first)}{words.role(first.role)} {_kind(first.name)}"
    tail = _tail(first.name)
    return f"{_stack(first)}{tail if _distinct(layers) else _unnumbered(tail)}"


def _short(layer: Layer) -> str:
    if layer.stream:
        return f"{words.role(layer.role)} {layer.stack}"
    vector = f" {layer.name.rsplit('.', 1)[-1]}" if layer.minor else ""
    return f"{_stack(layer)}{words.role(layer.role)}{vector}"


def _stack(layer: Layer) -> str:
    return f"stack {layer.stack} " if layer.stack else ""


def _tail(name: str) -> str:
    return _NUMBER.split(name, maxsplit=1)[-1].strip(".") or name


def _rank(role: str) -> int:
    # The residual stream leads; unknown roles come last.
    order = ("block", *ROLES)
    return order.index(role) if role in order else len(order)


def _curve(label: str, layers: Sequence[Layer]) -> Curve:
    ordered = sorted(layers, key=lambda layer: layer.depth)
    return _as_curve(label, ordered, [layer.depth for layer in ordered])


def _crowd(label: str, layers: Sequence[Layer]) -> Iterable[Curve]:
    by_depth: dict[int, list[Layer]] = {}
    for layer in layers:
        by_depth.setdefault(layer.depth, []).append(layer)
    depths = sorted(by_depth)
    columns = np.full((len(depths), max(map(len, by_depth.values()))), -1, np.int64)
    for place, depth in enumerate(depths):
        columns[place, : len(by_depth[depth])] = [layer.column for layer in by_depth[depth]]
    one = replace(
        _as_curve(label, [by_depth[depth][0] for depth in depths], depths), columns=columns
    )
    for among in _AMONG:
        names = tuple(
            f"{among} of {len(by_depth[d])}, {_every(by_depth[d][0].name)}" for d in depths
        )
        yield replace(one, label=f"{label}, {among}", names=names, among=among)


def _every(name: str) -> str:
    """A name with every number but the first, a block's, taken out."""
    first = _NUMBER.search(name)
    end = first.end() if first else 0
    return name[:end] + _NUMBER.sub("*", name[end:])


def _in_order(layers: Sequence[Layer]) -> Curve:
    return _as_curve("layers in order", layers, list(range(len(layers))))


def _outside(layers: Sequence[Layer], placed: Sequence[Layer], noun: str) -> tuple[Curve, ...]:
    """Embeddings before the first block, everything else after the last one."""
    rest = "after the blocks" if noun == "block" else "other layers"
    last = max((layer.depth for layer in placed), default=-1) + 1
    before = [layer for layer in layers if layer.role == "embed"]
    after = [layer for layer in layers if layer.role != "embed"]
    ends = (("embedding", before, -1), (rest, after, last))
    return tuple(
        _as_curve(label, group, [depth] * len(group), joined=False)
        for label, group, depth in ends
        if group
    )


def _as_curve(
    label: str, layers: Sequence[Layer], depths: Sequence[int], joined: bool = True
) -> Curve:
    return Curve(
        label=label,
        role=layers[0].role,
        stack=layers[0].stack,
        columns=np.array([layer.column for layer in layers], np.int64),
        depths=np.array(depths, np.int64),
        names=tuple(layer.name for layer in layers),
        minor=all(layer.minor for layer in layers),
        joined=joined,
    )
