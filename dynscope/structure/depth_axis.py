"""The depth axis: which modules repeat, in how many stacks, found by structure or as given."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress

from dynscope.errors import InputError
from dynscope.structure.node import Node

Stack = list[Node]

# Lists that hold less of the blocks' weights than this are no depth axis: heads, projections.
_SHARE = 0.05


def find_stacks(root: Node) -> list[Stack]:
    """The outermost lists of repeated modules, each a depth axis, in order of definition.

    Lists whose paths differ in numbers only (ResNet's ``layer1`` to ``layer4``) are one stack.
    """
    stacks = _stacks_below(root) or _stacks_below(root, single=True)
    sizes = [sum(node.numel for block in stack for node in block.walk()) for stack in stacks]
    return [s for s, size in zip(stacks, sizes, strict=True) if size >= _SHARE * max(sizes)]


def _stacks_below(node: Node, single: bool = False) -> list[Stack]:
    found: dict[str, Stack] = {}
    _collect(node, found, single)
    return list(found.values())


def _collect(node: Node, found: dict[str, Stack], single: bool) -> None:
    repeated = _repeated(node, single)
    staged = any(_is_stage(child, node) for child in repeated)
    for child in node.children:
        if child in repeated and not staged:
            found.setdefault(_numberless(child.path), []).append(child)
        else:
            _collect(child, found, single)


def _repeated(node: Node, single: bool) -> list[Node]:
    """The children that repeat: a list's, or those of one class and one name but for a number."""
    candidates = [c for c in node.children if not c.atomic and c.weighted]
    if "ModuleList" in node.kinds:
        return candidates
    if "Sequential" in node.kinds:  # its one kind of block, among an embedding, a head, a norm
        kinds = Counter(child.type for child in candidates)
        kind, count = kinds.most_common(1)[0] if kinds else ("", 0)
        if kind == "Sequential" and count < 3:
            return []  # two groups of layers are no depth axis yet
        return [c for c in candidates if c.type == kind and (count > 1 or single)]
    names = Counter(
        (_numberless(c.name), c.type) for c in candidates if c.name != _numberless(c.name)
    )
    return [c for c in candidates if names[_numberless(c.name), c.type] > 1]


def _is_stage(child: Node, parent: Node) -> bool:
    """Whether the repeated modules are inside ``child`` rather than ``child`` itself one of them."""
    if _is_list(child):
        inner = _repeated(child, single=False)
        return bool(inner) and len({node.type for node in inner}) == 1
    named = any("Stage" in kind for kind in child.kinds)
    return (named or not _is_list(parent)) and bool(_stacks_below(child))


def _numberless(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _is_list(node: Node) -> bool:
    return bool({"ModuleList", "Sequential"} & set(node.kinds))


def given_stacks(root: Node, blocks: str | Sequence[str]) -> list[Stack]:
    """The stacks that a user's paths and patterns name.

    A list stands for what it holds. As in `find_stacks`, paths that differ in numbers only are one
    stack, but each pattern and each list makes stacks of its own.
    """
    nodes = {node.path: node for node in root.walk() if node is not root}
    stacks: dict[tuple[int, str], Stack] = {}
    for place, pattern in enumerate([blocks] if isinstance(blocks, str) else blocks):
        found = [nodes[path] for path in matching(pattern, nodes, what="module")]
        if len(found) == 1 and found[0].children and _is_list(found[0]):
            found = found[0].children
        outermost = [node for node in found if not set(node.ancestors()) & set(found)]
        for node in outermost:
            key = (place if len(outermost) > 1 else -1, _numberless(node.path))
            stacks.setdefault(key, []).append(node)
    return list(stacks.values())


def matching(pattern: str, paths: Iterable[str], what: str) -> list[str]:
    """The paths that a pattern matches; `InputError` if there are none.

    It is read as a path, then as a glob whose ``*`` stands for one part of a path and ``**`` for
    any number, then as a regular expression for the whole path.
    """
    paths = list(paths)
    if pattern in paths:
        return [pattern]
    wild = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    glob = "".join(wild.get(part, re.escape(part)) for part in parts)
    found = [path for path in paths if re.fullmatch(glob, path)]
    if not found:
        with suppress(re.error):
            found = [path for path in paths if re.fullmatch(pattern, path)]
    if not found:
        some = ", ".join(paths[:3])
        raise InputError(f"No {what} of the model matches {pattern!r}; its first are {some}")
    return found
