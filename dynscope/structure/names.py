"""A checkpoint's tensors as the parameters of a model: roles, depth and layouts from names and shapes.

The tree of modules is put together from the names, each module's class guessed from the shapes it
holds and from the configuration; then the rules decide as they do about a live model.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from dynscope.site import Parameter, Site
from dynscope.structure.configs import Settings, family_prefix
from dynscope.structure.depth_axis import find_stacks
from dynscope.structure.gguf_names import is_gguf, translated
from dynscope.structure.layouts import Layout, Shape, layout_of, parts_of
from dynscope.structure.node import Node, join
from dynscope.structure.outline import outline
from dynscope.structure.roles import assign_roles, parameter_role
from dynscope.structure.rules import ADAPTED, WRAPPERS

_WRAPPING = {*WRAPPERS.values(), *ADAPTED.values()} - {"model"}

# What is stored with the weights and is not trained.
_BUFFERS = (
    r"(.*\.)?(running_(mean|var)|num_batches_tracked|inv_freq|original_inv_freq|position_ids"
    r"|token_type_ids|masked_bias|attn_mask|causal_mask|relative_position_index|tril|freqs_cis"
    r"|cos_cached|sin_cached|rope\.freqs|rope_freqs\.weight|final_logits_bias|_float_tensor|_extra_state"
    # What belongs to the codes of quantized weights: GPTQ, AWQ, bitsandbytes, 8-bit floats.
    r"|scales|qzeros|g_idx|SCB|weight_scale|weight_scale_inv|input_scale|weight_format"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*))"
)


@dataclass(frozen=True)
class Stored:
    """The shape of a weight that is on disk."""

    shape: Shape

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Structure:
    """What the names of a checkpoint's tensors say about its model.

    ``parameters`` lists every tensor once, the blocks in their order, then the parts of fused ones;
    ``stored`` is the name each whole has in the file, ``layouts`` how it divides. ``anatomy`` is the
    tree of modules with their roles, in words.
    """

    parameters: tuple[Parameter, ...]
    layouts: dict[str, Layout]
    stored: dict[str, str]
    anatomy: str = field(repr=False, default="")

    @classmethod
    def of(
        cls, shapes: Mapping[str, Shape], config: Mapping[str, Any] | None = None
    ) -> "Structure":
        """The structure of tensors with these names and shapes.

        ``config`` is a Hugging Face configuration, or the metadata of a GGUF file; without it fused
        weights stay whole where their layout cannot be seen from the shapes.
        """
        config = config or {}
        kept = {name: tuple(shape) for name, shape in shapes.items() if not _is_buffer(name, shape)}
        paths = translated(kept) if is_gguf(kept) else _as_in_memory(kept)
        root = _tree({paths[name]: shape for name, shape in kept.items()}, config)
        stacks = find_stacks(root)
        assign_roles(root, stacks)
        names = {path: name for name, path in paths.items()}
        shown = names if is_gguf(kept) else {path: path for path in names}
        wholes, layouts, stored = [], {}, {}
        for node, name, shape in _weights(root):
            path = join(node.path, name)
            role = parameter_role(node, name)
            whole = Parameter(shown[path], role, node.stack, node.depth, shape, prod(shape))
            layout = layout_of(node, name, shape, role)
            if layout is not None:
                layouts[whole.name] = layout
            stored[whole.name] = names[path]
            wholes.append(whole)
        return cls((*wholes, *parts_of(wholes, layouts)), layouts, stored, _told(root, len(stacks)))


def _as_in_memory(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """The path of each tensor in its model, where files of some families have other names.

    Granite's and JetMoE's experts are stored as ``input_linear`` and ``output_linear`` of three dimensions.
    """
    paths = {name: unwrapped(name) for name in shapes}
    for name, path in paths.items():
        told = re.fullmatch(r"(.*\.(?:mlp|block_sparse_moe))\.(input|output)_linear\.weight", path)
        if told and len(shapes[name]) == 3:
            own = "gate_up_proj" if told.group(2) == "input" else "down_proj"
            paths[name] = f"{told.group(1)}.experts.{own}"
        paths[name] = re.sub(r"\.router\.layer\.weight$", ".router.weight", paths[name])
    times = Counter(paths.values())  # two copies of a model, one of them wrapped, stay two
    return {name: path if times[path] == 1 else name for name, path in paths.items()}


def unwrapped(name: str) -> str:
    """A tensor's name without what wrappers (DDP, FSDP, torch.compile, PEFT) put in front of it."""
    path = re.sub(r"^base_model\.model\.", "", name)
    first, _, rest = path.partition(".")
    parts = path.split(".")
    return ".".join(part for part in parts if part not in _WRAPPING) if rest else first


def attention_kind(query: int, key: int, key_heads: int = 0) -> str:
    """MHA, GQA or MQA: from the rows of a query and a key matrix, and the number of key heads."""
    if query == key:
        return "MHA"
    return {0: "GQA or MQA", 1: "MQA"}.get(key_heads, "GQA")


def _is_buffer(name: str, shape: Iterable[int]) -> bool:
    causal = name.endswith("attn.bias") and len(tuple(shape)) == 4  # GPT-2's mask, as once stored
    return causal or re.fullmatch(_BUFFERS, name) is not None


# The tree


def _tree(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> Node:
    root = Node("", Settings(config), ())
    nodes = {"": root}
    for path, shape in shapes.items():
        owner, _, name = path.rpartition(".")
        node = _grown(owner, nodes, config)
        node.parameters.append((name, Stored(shape)))
        node.numel += prod(shape)
    prefix = family_prefix(config)
    for node in list(root.walk()):
        node.children.sort(key=_order)
    for node in root.walk():
        node.kinds = _kinds(node, prefix)
        if not config and any(name == "gate_up_proj_bias" for name, _ in node.parameters):
            node.module = Settings({"model_type": "gpt_oss"})  # no other experts have this bias
    return root


def _grown(path: str, nodes: dict[str, Node], config: Mapping[str, Any]) -> Node:
    """The node of a path, with those above it that are not there yet."""
    if path not in nodes:
        parent = _grown(path.rpartition(".")[0], nodes, config)
        nodes[path] = Node(path, Settings(config, path), (), parent)
        parent.children.append(nodes[path])
    return nodes[path]


def _order(node: Node) -> tuple[int, int]:
    """Numbers ascend and an encoder comes before its decoder; otherwise the order of the file."""
    if node.name.isdecimal():
        return (0, int(node.name))
    return (1, int(node.name == "decoder"))


def _kinds(node: Node, prefix: str) -> tuple[str, ...]:
    """What the classes of a module would be called."""
    shapes = {name: weight.shape for name, weight in node.parameters}
    if not node.children:
        return (_layer_kind(node.name, shapes),)
    if all(child.name.isdecimal() for child in node.children):
        return (_list_kind(node),)
    if "in_proj_weight" in shapes:
        return ("MultiheadAttention",)
    in_list = node.name.isdecimal() and node.parent is not None
    name = node.parent.name.rstrip("s") if in_list and node.parent else node.name
    return (prefix + _camel(name),)


def _list_kind(node: Node) -> str:
    """Layers of their own among the blocks are in a Sequential; blocks alone in either."""
    numbers = [int(child.name) for child in node.children]
    mixed = any(child.children for child in node.children) and any(
        not child.children for child in node.children
    )
    return "Sequential" if mixed or numbers != list(range(len(numbers))) else "ModuleList"


def _layer_kind(name: str, shapes: Mapping[str, Shape]) -> str:
    weight, bias = shapes.get("weight"), shapes.get("bias", ())
    if any(other.startswith("weight_ih_l") for other in shapes):
        return "RNN"
    if weight is None:
        if {"gamma", "beta"} <= shapes.keys():
            return "LayerNorm"
        return "Linear" if [*shapes] == ["bias"] else _camel(name)  # its weight is another's
    if len(weight) < 2:
        return "LayerNorm"
    if len(weight) > 2 and not name.endswith("_linear"):
        return f"Conv{min(len(weight) - 2, 3)}d"
    transposed = bias == weight[1:] if bias and weight[0] != weight[1] else False
    fused = name == "c_attn" and weight[1] == 3 * weight[0]
    return "Conv1D" if transposed or fused else "Linear"


def _camel(name: str) -> str:
    known = {"attn": "Attention", "mlp": "MLP"}
    return known.get(name) or "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def _weights(root: Node) -> Iterable[tuple[Node, str, Shape]]:
    for node in root.walk():
        for name, weight in node.parameters:
            yield node, name, weight.shape


def _told(root: Node, stacks: int) -> str:
    sites = tuple(
        Site(n.path, n.role, n.stack, n.depth, n.type)
        for n in root.walk()
        if n is not root and not n.container
    )
    blocks = len({(site.stack, site.depth) for site in sites if site.depth >= 0})
    axis = f"{blocks} blocks, by the names of the tensors" if blocks else "no blocks in the names"
    return "\n".join([axis + (f" in {stacks} stacks" if stacks > 1 else ""), *outline(sites)])
