"""How a stored weight divides into the matrices it stands for: fused q, k, v; gate and up; experts.

Only layouts that are known are split; a weight of unknown layout stays one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from dynscope.hooks.modules import Node


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

    def split(self, weight: Tensor) -> tuple[tuple[str, Tensor], ...]:
        """Each role with its part of ``weight``; with experts the parts keep dimension 0."""
        before, after = weight.shape[: self.dim], weight.shape[self.dim + 1 :]
        runs = weight.reshape(*before, self.groups, sum(self.sizes), *after)
        parts = runs.split(self.sizes, self.dim + 1)
        flat = (part.flatten(self.dim, self.dim + 1) for part in parts)
        return tuple(zip(self.roles, flat, strict=True))

    def matrices(self, weight: Tensor) -> Iterator[tuple[str, str, Tensor]]:
        """Each single matrix: its label ("q"; of the fourth expert "3.gate"), role and values."""
        for role, part in self.split(weight):
            if not self.experts:
                yield role, role, part
            for expert in range(self.experts):
                label = f"{expert}.{role}" if len(self.roles) > 1 else str(expert)
                yield label, role, part[expert]


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


def layout_of(owner: Node, name: str, weight: Tensor, role: str) -> Layout | None:
    """The layout of the weight that ``owner`` holds as ``name``, or None if it is one matrix."""
    stacked = owner.role == "experts" and any(p.dim() == 3 for _, p in owner.parameters)
    if stacked and weight.ndim >= 2:
        return _experts(owner, weight, role)
    if role == "qkv":
        return _fused(owner, name, weight)
    if role == "gate_up" and weight.shape[0] % 2 == 0:
        half = weight.shape[0] // 2
        return Layout(("gate", "up"), (half, half))
    return None


def _fused(owner: Node, name: str, weight: Tensor) -> Layout | None:
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
    if fused is None or not heads:
        return None
    groups = _count(attention.module, "num_key_value_heads", "num_kv_heads", "kv_heads") or heads
    dim = 1 if "Conv1D" in owner.kinds and weight.ndim == 2 else 0
    size, rest = divmod(weight.shape[dim], heads + 2 * groups)
    if rest or heads % groups or _count(attention.module, "head_dim") not in (0, size):
        return None
    roles = ("q", "k", "v")
    if fused.grouped:
        return Layout(roles, (heads // groups * size, size, size), dim, groups)
    return Layout(roles, (heads * size, groups * size, groups * size), dim)


def _count(module: nn.Module, *names: str) -> int:
    """The first of these numbers that the module or its config has, or 0."""
    for place in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int):
                return value
    return 0


def _experts(owner: Node, weight: Tensor, role: str) -> Layout:
    """Experts in one tensor: (experts, out, in), or (experts, in, out) where transposed."""
    experts, module = weight.shape[0], owner.module
    if role != "gate_up":
        return Layout((role,), (weight.shape[1],), 1, experts=experts)
    dim = 2 if weight.ndim == 3 and _transposed(owner, weight) else 1
    half = weight.shape[dim] // 2
    if getattr(module, "is_concatenated", True):
        return Layout(("gate", "up"), (half, half), dim, experts=experts)
    return Layout(("gate", "up"), (1, 1), dim, groups=half, experts=experts)


def _transposed(owner: Node, gate_up: Tensor) -> bool:
    said = getattr(owner.module, "is_transposed", None)
    down = dict(owner.parameters).get("down_proj")
    if said is None and down is not None and down.ndim == 3:
        return gate_up.shape[1] != 2 * down.shape[2]
    return bool(said)
