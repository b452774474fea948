"""A model's modules as a tree of `Node`, by the names they have without their wrappers."""

from torch import nn
from torch.nn.parameter import is_lazy

from dynscope.structure.node import Node, join
from dynscope.structure.rules import ADAPTED, WRAPPERS


def module_tree(model: nn.Module) -> Node:
    """The tree under ``model``. A module met again keeps its first path and gains an alias."""
    return _grow(model, "", None, {})


def _grow(module: nn.Module, path: str, parent: Node | None, seen: dict[int, Node]) -> Node:
    layers = _unwrapped(module)
    inner = layers[-1]
    kinds = tuple(dict.fromkeys(kind for layer in (inner, *layers) for kind in kinds_of(layer)))
    node = Node(path, inner, kinds, parent)
    adapted = next((ADAPTED[kind] for kind in kinds if kind in ADAPTED), None)
    if adapted is not None and hasattr(inner, adapted):
        layers.append(getattr(inner, adapted))  # its weights are the adapted layer's own
        node.kinds += kinds_of(layers[-1])
    for layer in layers:
        seen[id(layer)] = node
    for layer, wrapped in zip(layers, [*layers[1:], None], strict=True):
        node.parameters += layer.named_parameters(recurse=False, remove_duplicate=False)
        for name, child in layer._modules.items():
            if child is wrapped or child is None:
                continue
            if name == "parametrizations":  # weights of this layer in another guise
                node.parameters += child.named_parameters(name)
                continue
            child_path = join(path, name)
            known = seen.get(id(child))
            if known is not None:
                _alias(known, child_path)
            else:
                node.children.append(_grow(child, child_path, node, seen))
    node.numel = sum(0 if is_lazy(p) else p.numel() for _, p in node.parameters)
    return node


def _alias(node: Node, path: str) -> None:
    offset = len(node.path)
    for below in list(node.walk()):
        below.aliases.append(join(path, below.path[offset:].lstrip(".")))


def _unwrapped(module: nn.Module) -> list[nn.Module]:
    """The module and, if it is a wrapper, what it wraps, from the outside inwards."""
    layers = [module]
    while (inner := _wrapped(layers[-1])) is not None:
        layers.append(inner)
    return layers


def _wrapped(module: nn.Module) -> nn.Module | None:
    kinds = kinds_of(module)
    for kind, attribute in WRAPPERS.items():
        inner = getattr(module, attribute, None) if kind in kinds else None
        if isinstance(inner, nn.Module):
            return inner
    if "LightningModule" in kinds:  # its one child with weights, whatever the user calls it
        trained = [child for child in module.children() if any(True for _ in child.parameters())]
        return trained[0] if len(trained) == 1 else None
    return None


def kinds_of(module: nn.Module) -> tuple[str, ...]:
    """Class names, most derived first; a scripted module answers for what it was made from."""
    scripted = getattr(module, "original_name", None)
    names = [scripted] if isinstance(scripted, str) else []
    kinds = [kind for kind in type(module).__mro__ if kind not in (nn.Module, object)]
    names += [kind.__name__ for kind in kinds if not kind.__name__.endswith("Mixin")] or ["Module"]
    while len(names) > 1 and names[0] in (f"FSDP{names[1]}", f"Parametrized{names[1]}"):
        del names[0]  # classes made on the fly to shard or parametrize a module
    return tuple(names)
