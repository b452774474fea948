"""Check by numbers that what a sublayer adds and what it is added to are what anatomy says."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dynscope.hooks.model.anatomy import Anatomy


def unexplained(model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Tensor]) -> list[str]:
    """Sublayers for which input of `residual` + output of `branch` is no state of the model.

    The sum must be the input or output of some module; of parallel sublayers the sum of all.
    """
    entered, left = _observe(model, anatomy, inputs)
    states = [*entered.values(), *left.values()]
    added = {path: left[branch] for path, branch in anatomy.branch.items()}
    return [
        path
        for path, source in anatomy.residual.items()
        if not any(
            _among(entered[source] + added[path] + other, states)
            for other in _beside(path, anatomy, added)
        )
    ]


def _observe(
    model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    entered: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    handles = []
    for path, module in anatomy.modules.items():

        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            for found, value in ((entered, (args, kwargs)), (left, output)):
                tensor = _first(value)
                if tensor is not None:
                    found[path] = tensor.detach().clone()

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return entered, left


def _first(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    values = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, tuple | list | Mapping):
        return None
    return next((t for v in values if (t := _first(v)) is not None), None)


def _beside(path: str, anatomy: Anatomy, added: Mapping[str, Tensor]) -> list[Tensor]:
    """Nothing, or what another sublayer of the block adds to the same state, in parallel."""
    block = path.rpartition(".")[0]
    others = [added[p] for p in added if p != path and p.rpartition(".")[0] == block]
    return [torch.zeros(()), *(t for t in others if t.shape == added[path].shape)]


def _among(total: Tensor, states: list[Tensor]) -> bool:
    """Whether one of the states is the total; some code merges batch and tokens on the way."""
    return any(
        state.shape[-1:] == total.shape[-1:]
        and state.numel() == total.numel()
        and torch.allclose(state.reshape(-1), total.reshape(-1), rtol=1e-4, atol=1e-5)
        for state in states
    )
