"""The role of every module and parameter, by the table of rules and each module's surroundings."""

import re

from dynscope.structure.depth_axis import Stack
from dynscope.structure.node import Node
from dynscope.structure.rules import LINEAR, rule_for

SUBLAYERS = ("attention", "cross_attention", "ffn", "mixer")


def assign_roles(root: Node, stacks: list[Stack]) -> None:
    """Give every node under ``root`` its role, weight role, zone, stack and depth."""
    blocks = [block for stack in stacks for block in stack]
    starts = set(blocks)
    around = {above for block in blocks for above in block.ancestors()}
    for index, stack in enumerate(stacks):
        others = {above for s in stacks if s is not stack for b in s for above in b.ancestors()}
        _set_stack(stack, index, others)
    root.zone = "outside" if blocks else "layers"
    for node in root.walk():
        if node.parent is not None:
            node.zone = node.parent.zone
            if node in starts:
                node.role = node.zone = "block"
            elif node not in around:
                _assign(node, node.parent)
    _outer_linears(list(root.walk()), blocks)
    for block in blocks:
        _inner_linears(block)
    for node in root.walk():
        node.weight_role = node.weight_role or _weight_role(node)


def _set_stack(stack: Stack, index: int, others: set[Node]) -> None:
    """What surrounds a stack's blocks and no other stack's belongs to it: T5's last norms."""
    for above in stack[0].ancestors():
        if above not in others:
            for node in above.walk():
                node.stack = index
    for depth, block in enumerate(stack):
        for node in block.walk():
            node.stack, node.depth = index, depth


def _assign(node: Node, parent: Node) -> None:
    if parent.container and parent.role == "experts":
        node.role = "experts"
        return
    siblings = tuple(child.name for child in parent.children if child is not node)
    rule = rule_for(node.zone, node.name, node.kinds, siblings, node.atomic)
    if rule is not None:
        node.role, node.zone = rule.role, rule.zone or node.zone


def is_linear(node: Node) -> bool:
    return node.atomic and any(re.search(LINEAR, kind) for kind in node.kinds)


def _outer_linears(nodes: list[Node], blocks: Stack) -> None:
    """Linear layers that no rule knows: before the blocks they embed, after them they are the head.

    Without blocks they are the network itself, and the last one is its head.
    """
    place = {node: index for index, node in enumerate(nodes)}
    first, last = (f((place[block] for block in blocks), default=-1) for f in (min, max))
    unknown = [n for n in nodes if n.role == "other" and n.zone in ("outside", "layers")]
    unknown = [n for n in unknown if is_linear(n)]
    for node in unknown:
        if not blocks:
            node.role = "ffn"
        elif place[node] < first:
            node.role = "embed"
        elif place[node] > last:
            node.role = "head"
    if unknown and not blocks and not any(node.role == "head" for node in nodes):
        unknown[-1].role = "head"


def _inner_linears(block: Node) -> None:
    """What the table leaves open inside a block."""
    _two_linears([node for node in block.walk() if node.zone == "ffn"])
    for node in block.walk():
        if node.role == "experts":
            _two_linears(list(node.walk()))
    sublayers = [node for node in block.walk() if node.role in SUBLAYERS]
    if not sublayers:
        _two_linears(list(block.walk()))
        linears = [node for node in block.walk() if is_linear(node)]
        if len(linears) == 1 and linears[0].role == "other":
            linears[0].role = "ffn"
        return
    # A sublayer written out in the block itself has no module; its last layer stands for it.
    for role, last in (("attention", "o"), ("ffn", "out")):
        ends = [node for node in block.children if node.role == last]
        if ends and not any(node.role == role for node in sublayers):
            ends[-1].role, ends[-1].weight_role = role, last


def _two_linears(nodes: list[Node]) -> None:
    """Of exactly two linear layers, both unknown, the first leads in and the second out."""
    linears = [node for node in nodes if is_linear(node)]
    if len(linears) == 2 and all(node.role == "other" for node in linears):
        linears[0].role, linears[1].role = "in", "out"


def _weight_role(node: Node) -> str:
    """A module's own role; inside a sublayer, an embedding or the head at least that."""
    if node.role != "other" or node.parent is None:
        return node.role
    above = node.parent
    while above.parent is not None and above.role == "other":
        above = above.parent
    return above.role if above.role in (*SUBLAYERS, "embed", "head", "experts") else "other"


# Modules whose bare parameters are matrices in their own right: `in_proj_weight`, experts'
# `down_proj`, `pos_embed`.
_OWNERS = ("block", "experts", "embed", "other", *SUBLAYERS)


def parameter_role(node: Node, name: str) -> str:
    """The role of a parameter that ``node`` owns under ``name``."""
    if node.role in _OWNERS and name not in ("weight", "bias") and not is_linear(node):
        rule = rule_for(node.zone, re.sub(r"_(weight|bias)$", "", name), ("Linear",))
        if rule is not None and rule.role not in ("norm", "activation"):
            return rule.role
    return node.weight_role
