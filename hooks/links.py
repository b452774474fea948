"""Where a model's paths lead, followed when a module is put in another's place."""

import torch
from torch import nn


class Links:
    """Keeps ``modules`` (path -> module) true to the model: fine-tuning swaps heads, pruning layers.

    Paths that pass through a wrapper are left as they were.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._links: list[tuple[str, str, str]] = []
        for path, module in modules.items():
            parent, _, name = path.rpartition(".")
            if path and parent in modules and _child(modules[parent], name) is module:
                self._links.append((path, parent, name))

    def follow(self) -> list[str]:
        """Paths whose module is another one than at the last call, or is gone; parents first."""
        changed = []
        for path, parent, name in self._links:
            holder = self._modules.get(parent)
            child = _child(holder, name) if holder is not None else None
            if child is self._modules.get(path):
                continue
            changed.append(path)
            if child is None:
                del self._modules[path]
            else:
                self._modules[path] = child
        return [path for path in changed if path.rpartition(".")[0] not in changed]


def _child(module: nn.Module, name: str) -> nn.Module | None:
    return None if isinstance(module, torch.jit.ScriptModule) else module._modules.get(name)
