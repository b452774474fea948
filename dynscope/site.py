"""Places in a model: a `Site` is a module whose output is observed, a `Parameter` is a weight."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

ROLES: tuple[str, ...] = (
    "embed", "block", "attention", "cross_attention", "ffn", "mixer", "norm", "q", "k", "v", "qkv",
    "o", "gate", "up", "gate_up", "down", "in", "out", "router", "experts", "adapter", "conv",
    "activation", "dropout", "pool", "head", "other",
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A module of the model, by its path, with its place on the depth axis.

    ``role`` is one of `ROLES`; the output of a ``block`` is the residual stream. ``stack`` tells
    several depth axes apart (an encoder is 0, a decoder 1), and several residual streams in the
    output of one block, whose sites are ``blocks.3[0]``, ``blocks.3[1]`` and so on. ``depth`` is the 0-based index of the
    block the module belongs to, or -1 outside the blocks. ``type`` is the module's class name,
    ``dtype`` the output's, ``aliases`` the other names of the same module object.
    """

    path: str
    role: str
    stack: int = 0
    depth: int = -1
    type: str = ""
    dtype: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The module's path: without the number of one of several residual streams, ``[2]``."""
        return re.sub(r"\[\d+\]$", "", self.path) if self.role == "block" else self.path


POOLED = "[pooled]"
"""``part_of`` of an entry that stands for all matrices of one role together."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, counted once however many modules share it.

    ``role`` is the role of the module that owns it, ``group`` the index of its optimizer
    parameter group, or -1 when no optimizer holds it. ``part_of`` is empty, or the name of the
    parameter that this is one matrix of: ``attn.c_attn.weight[q]`` is a part of
    ``attn.c_attn.weight``, and has numbers of its own only where weights are measured.

    Where it is `POOLED` the entry is all matrices of its role and stack taken together, ``[all
    gate]``, which stand at depth -1; ``shape`` is (number of matrices,).
    """

    name: str
    role: str
    stack: int = 0
    depth: int = -1
    shape: tuple[int, ...] = ()
    numel: int = 0
    trainable: bool = True
    group: int = -1
    part_of: str = ""


def wholes(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """The model's parameters, without the parts that fused ones divide into."""
    return tuple(parameter for parameter in parameters if not parameter.part_of)


def undivided(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Every weight once, as finely as it is known: the parts instead of what they are parts of."""
    every = tuple(parameters)
    divided = {parameter.part_of for parameter in every}
    return tuple(p for p in every if p.name not in divided and p.part_of != POOLED)


def pools(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """The entries that stand for all matrices of a role together."""
    return tuple(parameter for parameter in parameters if parameter.part_of == POOLED)
