"""A model's modules as a tree: what the rules read, made from a live model or from tensors' names."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dynscope.structure.rules import ADAPTED


@dataclass(eq=False)
class Node:
    """A module under its first unwrapped path; wrappers and what they wrap are one node.

    ``module`` is what its settings are asked of (``num_heads``, ``config``), ``parameters`` are the
    weights it holds itself, by name, as anything that has a shape, ``numel`` how many numbers these are.
    ``role``, ``stack`` and ``depth`` are those of its `dynscope.site.Site`, ``weight_role`` is that
    of its parameters and ``zone`` where in the model its children are (see `rules.Rule`).
    """

    path: str
    module: Any
    kinds: tuple[str, ...]
    parent: "Node | None" = None
    children: "list[Node]" = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    parameters: list[tuple[str, Any]] = field(default_factory=list)
    numel: int = 0
    role: str = "other"
    weight_role: str = ""
    zone: str = "outside"
    stack: int = 0
    depth: int = -1

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def type(self) -> str:
        return self.kinds[0]

    def walk(self) -> "Iterator[Node]":
        """This node and all below it, in definition order."""
        yield self
        for child in self.children:
            yield from child.walk()

    def ancestors(self) -> "Iterator[Node]":
        above = self.parent
        while above is not None:
            yield above
            above = above.parent

    @property
    def weighted(self) -> bool:
        return any(node.parameters for node in self.walk())

    @property
    def atomic(self) -> bool:
        """A layer: without children, or one whose children are no layers of their own."""
        return not self.children or bool(ADAPTED.keys() & set(self.kinds))

    @property
    def container(self) -> bool:
        """A list or dictionary of modules, which is never called itself."""
        return bool(
            {"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"} & set(self.kinds)
        )


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
