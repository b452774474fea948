"""What an optimizer's own hooks ask of it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dynscope.hooks.tally import Tally
from dynscope.tally import OPTIMIZER

StepHook = Callable[[Optimizer, Any, Any], None]

SILENT = 32


class Optimizers:
    """The optimizers whose steps are followed: none, one, or several of one training step.

    Of several, the training step is over when each has stepped. One that never does, while another
    steps `SILENT` times, is not waited for any more.
    """

    def __init__(self, given: Sequence[Optimizer]) -> None:
        self._all = tuple(given)
        self._steps = {id(each): 0 for each in given}  # since the last training step
        self._waited_for = set(self._steps)

    def __bool__(self) -> bool:
        return bool(self._all)

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all."""
        return [group for optimizer in self._all for group in optimizer.param_groups]

    def first_group(self, optimizer: Optimizer) -> int:
        """The place of an optimizer's groups among all."""
        before = self._all[: [id(each) for each in self._all].index(id(optimizer))]
        return sum(len(each.param_groups) for each in before)

    def alone(self) -> bool:
        return len(self._all) == 1

    def hook(self, before: StepHook, after: StepHook) -> list[RemovableHandle]:
        return [
            handle
            for optimizer in self._all
            for handle in (
                optimizer.register_step_pre_hook(before),
                optimizer.register_step_post_hook(after),
            )
        ]

    def stepped(self, optimizer: Optimizer) -> bool:
        """Note a step; whether the training step is over with it."""
        self._steps[id(optimizer)] += 1
        if self._steps[id(optimizer)] >= SILENT:
            self._waited_for = {each for each, steps in self._steps.items() if steps}
        self._waited_for.add(id(optimizer))
        over = all(self._steps[each] for each in self._waited_for)
        if over:
            self._steps = dict.fromkeys(self._steps, 0)
        return over


def held(optimizer: Optimizer) -> set[int]:
    """The parameters of an optimizer, by identity."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def read_optimizer(optimizer: Optimizer, tally: Tally, first: int = 0) -> None:
    """The settings of each parameter group, as the coming step uses them, from row ``first``."""
    for row, group in zip(tally.optimizer[first:], optimizer.param_groups, strict=False):
        betas = group.get("betas")
        if not isinstance(betas, (tuple, list)) or len(betas) < 2:
            betas = (group.get("beta1", group.get("momentum")), group.get("beta2"))
        settings: dict[str, Any] = {**group, "beta1": betas[0], "beta2": betas[1]}
        for i, name in enumerate(OPTIMIZER):
            value = settings.get(name, torch.nan)
            row[i] = value if isinstance(value, (int, float, Tensor)) else torch.nan


def within_a_step(optimizer: Optimizer) -> bool:
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


def found_inf(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer is about to skip, where that is known without waiting."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())
