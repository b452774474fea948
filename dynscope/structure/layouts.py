"""How a stored weight divides into the matrices it stands for: fused q, k, v; gate and up; experts.

Only layouts that are known are split; a weight of unknown layout stays one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

from dynscope.site import Parameter
from dynscope.structure.node import Node

Shape = tuple[int, ...]
Weight = TypeVar("Weight", bound=Any)  # an array of numpy or a tensor of torch


@dataclass(frozen=True)
class Layout:
    """The matrices inside one weight, along dimension ``dim``.

    The dimension holds ``groups`` runs, one after the other, and each run ``sizes[i]`` rows of
    ``roles[i]``: a contiguous q, k, v is one run, one interleaved per head a run for each head.
    Where ``experts`` is not 0, dimension 0 counts experts, whose matrices are separate.
    """

    roles: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int = 0
    groups: int = 1
    experts: int = 0

    def split(self, weight: Weight) -> tuple[tuple[str, Weight], ...]:
        """Each role with its part of ``weight``; with experts the parts keep dimension 0.

        A part is a view where its rows stand together, else a copy.
        """
        before, after = weight.shape[: self.dim], weight.shape[self.dim + 1 :]
        runs = weight.reshape(*before, self.groups, sum(self.sizes), *after)
        parts, start = [], 0
        for role, size in zip(self.roles, self.sizes, strict=True):
            part = runs[(*[slice(None)] * (self.dim + 1), slice(start, start + size))]
            parts.append((role, part.reshape(*before, self.groups * size, *after)))
            start += size
        return tuple(parts)

    def matrices(self, weight: Weight) -> Iterator[tuple[str, str, Weight]]:
        """Each single matrix: its label ("q"; of the fourth expert "3.gate"), role and values."""
        for role, part in self.split(weight):
            if not self.experts:
                yield role, role, part
            for expert in range(self.experts):
                yield self._label(role, expert), role, part[expert]

    def described(self, shape: Shape) -> Iterator[tuple[str, str, Shape]]:
        """`matrices` of a weight of this shape, with each one's shape in place of its values."""
        for role, size in zip(self.roles, self.sizes, strict=True):
            part = (*shape[: self.dim], self.groups * size, *shape[self.dim + 1 :])
            if not self.experts:
                yield role, role, part
            for expert in range(self.experts):
                yield self._label(role, expert), role, part[1:]

    def _label(self, role: str, expert: int) -> str:
        return f"{expert}.{role}" if len(self.roles) > 1 else str(expert)


def parts_of(
    parameters: Iterable[Parameter], layouts: Mapping[str, Layout]
) -> tuple[Parameter, ...]:
    """The parts of every matrix of known layout, in their order.

    A part is called ``name[label]``, by its role and, of experts in one tensor, its expert's
    number. Biases are not divided.
    """
    return tuple(
        replace(
            whole,
            name=f"{whole.name}[{label}]",
            role=role,
            shape=shape,
            numel=prod(shape),
            part_of=whole.name,
        )
        for whole in parameters
        if whole.name in layouts
        for label, role, shape in layouts[whole.name].described(whole.shape)
        if len(shape) >= 2
    )


@dataclass(frozen=True)
class Fused:
    """A layer that holds q, k and v: patterns for the attention's class and the layer's name.

    ``grouped``: q, k and v of one key-value head stand together; else all q, all k, all v.
    """

    kind: str
    name: str
    grouped: bool = False


FUSED: tuple[Fused, ...] = (
    Fused("^GPTNeoX|^Bloom|^Falcon", "query_key_value", grouped=True),
    Fused("^GPTBigCode", "c_attn", grouped=True),
    Fused("^MultiheadAttention$", "in_proj"),
    Fused("", "c_attn"),  # GPT-2 and all that descends from it
    Fused("^Attention$", "qkv"),  # timm, DINO, MAE
    Fused("^Phi3", "qkv_proj"),
    Fused("", "Wqkv"),  # MPT, ModernBERT, flash-attn
)


def layout_of(owner: Node, name: str, shape: Shape, role: str) -> Layout | None:
    """The layout of the weight that ``owner`` holds as ``name``, or None if it is one matrix."""
    stacked = owner.role == "experts" and any(p.ndim == 3 for _, p in owner.parameters)
    if stacked and len(shape) >= 2:
        return _experts(owner, shape, role)
    if role == "qkv":
        return _fused(owner, name, shape)
    if role == "gate_up" and shape[0] % 2 == 0:
        half = shape[0] // 2
        return Layout(("gate", "up"), (half, half))
    return None


def _fused(owner: Node, name: str, shape: Shape) -> Layout | None:
    bare = name not in ("weight", "bias")  # torch's in_proj_weight belongs to the attention itself
    attention = owner if bare or owner.parent is None else owner.parent
    layer = re.sub("_(weight|bias)$", "", name) if bare else owner.name
    fused = next(
        (
            f
            for f in FUSED
            if f.name == layer and any(re.search(f.kind, k) for k in attention.kinds)
        ),
        None,
    )
    heads = _count(attention.module, "num_heads", "num_attention_heads", "n_head", "n_heads")
    dim = 1 if "Conv1D" in owner.kinds and len(shape) == 2 else 0
    if fused is None:
        return None
    if not heads and not fused.grouped and shape[dim] == 3 * shape[dim - 1]:
        heads = 1  # three equal parts, one after the other, however many heads are in each
    if not heads:
        return None
    said = _count(attention.module, "num_key_value_heads", "num_kv_heads", "kv_heads")
    contiguous = len(shape) > 1 and not fused.grouped
    if not said and contiguous and shape[dim] != 3 * shape[dim - 1]:
        return None  # fewer key-value heads, whose number is not known
    groups = said or heads
    size, rest = divmod(shape[dim], heads + 2 * groups)
    if rest or heads % groups or _count(attention.module, "head_dim") not in (0, size):
        return None
    roles = ("q", "k", "v")
    if fused.grouped:
        return Layout(roles, (heads // groups * size, size, size), dim, groups)
    return Layout(roles, (heads * size, groups * size, groups * size), dim)


def _count(module: Any, *names: str) -> int:
    """The first of these numbers that the module or its config has, or 0."""
    for place in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 0


def _experts(owner: Node, shape: Shape, role: str) -> Layout:
    """Experts in one tensor: (experts, out, in), or (experts, in, out) where transposed."""
    experts, module = shape[0], owner.module
    if role != "gate_up":
        return Layout((role,), (shape[1],), 1, experts=experts)
    dim = 2 if len(shape) == 3 and _transposed(owner, shape) else 1
    half = shape[dim] // 2
    if getattr(module, "is_concatenated", True):
        return Layout(("gate", "up"), (half, half), dim, experts=experts)
    return Layout(("gate", "up"), (1, 1), dim, groups=half, experts=experts)


def _transposed(owner: Node, gate_up: Shape) -> bool:
    said = getattr(owner.module, "is_transposed", None)
    down = dict(owner.parameters).get("down_proj")
    if said is None and down is not None and down.ndim == 3:
        return gate_up[1] != 2 * int(down.shape[2])
    return bool(said)
