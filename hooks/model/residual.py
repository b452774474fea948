"""Where the sublayers of a block leave the residual stream and where they come back to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dynscope.hooks.model.families import FAMILIES, Family
from dynscope.structure.node import Node
from dynscope.structure.roles import SUBLAYERS, is_linear


@dataclass
class Residual:
    """Sublayer's path -> path of the module whose input (output) is the stream (what is added)."""

    residual: dict[str, str] = field(default_factory=dict)
    branch: dict[str, str] = field(default_factory=dict)


def trace_block(block: Node, into: Residual) -> None:
    """Add the block's sublayers: from the table of families, else by order of definition."""
    inside = {node.path[len(block.path) :].lstrip("."): node for node in block.walk()}
    sublayers = [node for node in inside.values() if node.role in SUBLAYERS]
    if all(is_linear(node) and node.weight_role == "ffn" for node in sublayers):
        return  # the layers of a plain network, which need not have a residual
    for sublayer in sublayers:
        into.branch[sublayer.path] = sublayer.path
    if block.parameters:
        return  # the block's own parameters may scale what it adds: ReZero, BEiT
    family = next((family for family in FAMILIES if _fits(family, block, inside)), None)
    if family is not None:
        _by_family(family, inside, sublayers, into)
    else:
        _by_order(block, sublayers, into)


def _fits(family: Family, block: Node, inside: Mapping[str, Node]) -> bool:
    return (
        inside.keys() >= set(family.has)
        and not inside.keys() & set(family.lacks)
        and any(kind.startswith(family.kind) for kind in block.kinds)
        and family.pre_norm in (None, _pre_norm(block))
    )


def _pre_norm(block: Node) -> bool | None:
    """What the block's own attribute says of its norms' place, if it has one."""
    for name in ("norm_first", "do_layer_norm_before"):
        said = getattr(block.module, name, None)
        if isinstance(said, bool):
            return said
    return None


def _by_family(
    family: Family, inside: Mapping[str, Node], sublayers: list[Node], into: Residual
) -> None:
    for route in family.routes:
        for sublayer in sublayers:
            if sublayer.role == route.role:
                source = sublayer if route.residual is None else inside[route.residual]
                target = sublayer if route.branch is None else inside[route.branch]
                into.residual[sublayer.path] = source.path
                into.branch[sublayer.path] = target.path


def _by_order(block: Node, sublayers: list[Node], into: Residual) -> None:
    """Norms in front of sublayers, behind them, or both, as the order of definition has them."""
    gaps = _between(block, sublayers, lambda node: node.role == "norm")
    n, counts = len(sublayers), [len(gap) for gap in gaps]
    # transformers' authors define norms last wherever they use them: there that proves nothing
    borrowed = type(block.module).__module__.startswith("transformers")
    sources: list[Node | None]
    if counts == [1] * n + [0]:  # Pre-LN
        sources = [gap[0] for gap in gaps[:-1]]
    elif n > 1 and sum(counts) == 1 and (borrowed or counts[0]):  # one norm: in parallel
        sources = [block] * n
    elif borrowed and any(counts):
        return
    elif counts == [1] + [2] * (n - 1) + [1]:  # norms on both sides
        sources = [gap[-1] for gap in gaps[:-1]]
        for sublayer, gap in zip(sublayers, gaps[1:], strict=True):
            into.branch[sublayer.path] = gap[0].path
    elif counts == [n] + [0] * n:  # all norms first
        sources = list(gaps[0])
    elif counts == [0] + [1] * n or not any(counts):  # Post-LN, or no norms
        sources = [_entry(block, sublayer) for sublayer in sublayers]
    else:
        return
    scales = _between(block, sublayers, lambda node: "LayerScale" in node.kinds)
    for sublayer, after in zip(sublayers, scales[1:], strict=True):
        if after:
            into.branch[sublayer.path] = after[0].path
    if not block.container:
        sources[0] = block
    into.residual.update({s.path: x.path for s, x in zip(sublayers, sources, strict=True) if x})


def _between(
    block: Node, sublayers: list[Node], wanted: Callable[[Node], bool]
) -> list[list[Node]]:
    """The wanted modules before the first sublayer, between each two and after the last."""
    gaps: list[list[Node]] = [[]]
    inside = {node for sublayer in sublayers for node in sublayer.walk()}
    for node in block.walk():
        if node in sublayers:
            gaps.append([])
        elif wanted(node) and node not in inside:
            gaps[-1].append(node)
    return gaps


def _entry(block: Node, sublayer: Node) -> Node | None:
    """The module that a sublayer's input goes into: itself, or its first layer if written out."""
    if sublayer.weight_role == sublayer.role:
        return sublayer
    first = {"ffn": ("in", "gate"), "attention": ("q", "qkv")}[sublayer.role]
    return next((node for node in block.children if node.role in first), None)
