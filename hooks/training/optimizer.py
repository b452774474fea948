"""What an optimizer's own hooks ask of it."""

import sys
import weakref
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dynscope.analysis.sums import OPTIMIZER
from dynscope.hooks.tensor.private import OPTIMIZER_STEP, step_hooks
from dynscope.hooks.tensor.tally import Tally
from dynscope.hooks.training.wrapped import Followed, followed

StepHook = Callable[[Optimizer, Any, Any], None]

SILENT = 32


class Optimizers:
    """The optimizers whose steps are followed: none, one, or several of one training step.

    Of several, the training step is over when each has stepped. One that never does, while another
    steps `SILENT` times, is not waited for any more. Where they step inside of a backward, the
    training step is over at its end: those that have no gradient then are not waited for.
    """

    def __init__(self, given: Sequence[Followed]) -> None:
        self._before: StepHook | None = None
        self._after: StepHook | None = None
        self._handles: dict[int, tuple[RemovableHandle, RemovableHandle]] = {}
        self._others: RemovableHandle | None = None
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._follow(given)

    def _follow(self, given: Sequence[Followed]) -> None:
        self._all = tuple(given)
        self._place = {id(part): k for k, each in enumerate(self._all) for part in each.all}
        self._steps = [0] * len(self._all)  # since the last training step
        self._waited_for = set(range(len(self._all)))
        self._missing = set(self._waited_for)
        self._first: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def __iter__(self) -> Iterator[Optimizer]:
        return (part for each in self._all for part in each.all)

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all."""
        return [group for each in self._all for group in each.optimizer.param_groups]

    def group_places(self, optimizer: Optimizer) -> tuple[Optimizer, int, int]:
        """Whose groups hold for a step of ``optimizer``, their place among all, and how many all are."""
        if not self._first:
            self._first = [0]
            for each in self._all:
                self._first.append(self._first[-1] + len(each.optimizer.param_groups))
        k = self._place[id(optimizer)]
        return self._all[k].optimizer, self._first[k], self._first[-1]

    def alone(self) -> bool:
        return len(self._all) == 1

    def wrappers(self) -> list[str]:
        """What to say of optimizers that were given inside of wrappers."""
        return [
            f"{each.wrapper} wraps {type(each.optimizer).__name__}, whose own steps are followed: "
            "what the wrapper changes besides is not in update/*"
            for each in self._all
            if each.wrapper
        ]

    # Hooks

    def hook(self, before: StepHook, after: StepHook, other: StepHook) -> None:
        """Have ``before`` and ``after`` called around each step, ``other`` before those of others."""
        if not self._all:
            return
        self._before, self._after = before, after
        self._others = register_optimizer_step_pre_hook(other)
        for each in self:
            self._register(each)

    def _register(self, optimizer: Optimizer) -> None:
        assert self._before is not None and self._after is not None
        self._handles[id(optimizer)] = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    def unhook(self) -> None:
        for handle in (self._others, *(each for two in self._handles.values() for each in two)):
            if handle is not None:
                handle.remove()

    def go_last(self) -> None:
        """Let the step hooks that the user has registered since run before ours."""
        for optimizer in self:
            hooks = step_hooks(optimizer)
            mine = self._handles[id(optimizer)][0].id
            # Moved while they are being called, they would raise into the training.
            if hooks and mine in hooks and next(reversed(hooks)) != mine and not self.under_way():
                hooks.move_to_end(mine)

    def is_last(self, optimizer: Optimizer) -> bool:
        """Whether no hook of the user's runs after ours and may still change gradients."""
        ours = getattr(self._before, "__func__", None)  # also of another recorder
        hook = next(reversed((step_hooks(optimizer) or {}).values()), None)
        return hook is None or getattr(hook, "__func__", None) is ours

    # Steps

    def family(self, optimizer: Optimizer) -> Collection[int]:
        """By identity, the optimizers whose steps may call a step of ``optimizer``."""
        return {id(part) for part in self._all[self._place[id(optimizer)]].all}

    def under_way(self) -> bool:
        """Whether one of them is in its step."""
        return in_a_step(self._place)

    def stepped(self, optimizer: Optimizer) -> bool:
        """Note a step; whether the training step is over with it."""
        k = self._place[id(optimizer)]
        self._steps[k] += 1
        if self._steps[k] >= SILENT:
            self._waited_for = {each for each, steps in enumerate(self._steps) if steps}
            self._missing &= self._waited_for
        self._waited_for.add(k)
        self._missing.discard(k)
        return not self._missing

    def ended(self) -> bool:
        """Whether the training step is over with the backward in which they stepped."""
        return any(self._steps) and not any(
            parameter.grad is not None
            for k in self._missing
            for group in self._all[k].optimizer.param_groups
            for parameter in group["params"]
        )

    def finish(self) -> None:
        """The training step is over."""
        self._steps = [0] * len(self._all)
        self._missing = set(self._waited_for)
        self._first = []

    # Others

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether it is followed, or has been found to be none to follow."""
        return id(optimizer) in self._place or optimizer in self._strangers

    def replace(self, optimizer: Optimizer, parameters: Collection[int]) -> str:
        """Follow ``optimizer`` in place of those whose ``parameters`` it all holds; what to say.

        Nothing where there are none: it is a stranger.
        """
        theirs = held(optimizer) & set(parameters)
        gone = []
        for each in self._all:
            ours = held(each.optimizer) & set(parameters)
            if theirs and ours <= theirs and (ours or self.alone()):
                gone.append(each)
        if not gone:
            self._strangers.add(optimizer)
            return ""
        new = followed(optimizer)[0]
        place = self._all.index(gone[0])
        rest = [each for each in self._all if each not in gone]
        for each in gone:
            for part in each.all:
                for handle in self._handles.pop(id(part)):
                    handle.remove()
        self._follow([*rest[:place], new, *rest[place:]])
        for part in new.all:
            self._register(part)
        names = " and ".join(type(each.optimizer).__name__ for each in gone)
        return f"{names} steps no more, {type(optimizer).__name__} is followed in its place"


def held(optimizer: Optimizer) -> set[int]:
    """The parameters of an optimizer, by identity."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def read_optimizer(optimizer: Optimizer, tally: Tally, first: int = 0) -> None:
    """The settings of each parameter group, as the coming step uses them, from row ``first``."""
    rows = tally.optimizer if tally.on_host is None else tally.on_host["optimizer"]
    for at, group in enumerate(optimizer.param_groups[: max(0, len(rows) - first)], first):
        betas = group.get("betas")
        if not isinstance(betas, (tuple, list)) or len(betas) < 2:
            betas = (group.get("beta1", group.get("momentum")), group.get("beta2"))
        settings: dict[str, Any] = {**group, "beta1": betas[0], "beta2": betas[1]}
        for i, name in enumerate(OPTIMIZER):
            value = settings.get(name)
            value = value.detach() if isinstance(value, Tensor) else value
            rows[at, i] = value if isinstance(value, (int, float, Tensor)) else torch.nan


def in_a_step(optimizers: Container[int], caller: FrameType | None = None) -> bool:
    """Whether a step of one of ``optimizers``, by identity, is under way, as Python's stack tells.

    With the ``caller`` of a step hook: another step than the one that calls the hook. A subclass
    whose ``step`` calls its parent's, or an optimizer that steps another one, has hooks called by
    both.
    """
    frame = sys._getframe(1) if caller is None else caller.f_back
    while frame is not None:
        if frame.f_code is OPTIMIZER_STEP and any(
            id(each) in optimizers for each in frame.f_locals.get("args", ())[:1]
        ):
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
