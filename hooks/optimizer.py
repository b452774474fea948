"""What an optimizer's own hooks ask of it."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dynscope.hooks.tally import Tally
from dynscope.tally import OPTIMIZER


def read_optimizer(optimizer: torch.optim.Optimizer, tally: Tally) -> None:
    """The settings of each parameter group, as the coming step uses them."""
    for row, group in zip(tally.optimizer, optimizer.param_groups, strict=False):
        betas = group.get("betas")
        if not isinstance(betas, (tuple, list)) or len(betas) < 2:
            betas = (group.get("beta1", group.get("momentum")), group.get("beta2"))
        settings: dict[str, Any] = {**group, "beta1": betas[0], "beta2": betas[1]}
        for i, name in enumerate(OPTIMIZER):
            value = settings.get(name, torch.nan)
            row[i] = value if isinstance(value, (int, float, Tensor)) else torch.nan


def within_a_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the hook that asks was called by a step that another step of ``optimizer`` made.

    A subclass whose ``step`` calls its parent's has its hooks called by both.
    """
    caller = sys._getframe(2)
    frame = caller.f_back
    while frame is not None:
        if frame.f_code is caller.f_code and optimizer in frame.f_locals.get("args", ())[:1]:
            return True
        frame = frame.f_back
    return False


def evaluates(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a step called so computes its gradients itself, through a closure."""
    return any(callable(value) for value in (*args[1:], kwargs.get("closure")))


def found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer is about to skip, where that is known without waiting."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())
