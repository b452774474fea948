"""Optimizers inside of others: which of them step, and whose steps count."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer


@dataclass(frozen=True)
class Followed:
    """An optimizer whose steps count.

    ``inside``: optimizers that it steps itself. ``wrapper``: the type of what was given in its
    place, which does not tell of its steps.
    """

    optimizer: Optimizer
    inside: tuple[Optimizer, ...] = ()
    wrapper: str = ""

    @property
    def all(self) -> tuple[Optimizer, ...]:
        return (self.optimizer, *self.inside)


def followed(given: object) -> list[Followed]:
    """What to follow of an optimizer or of a wrapper around some; nothing where there is none."""
    if _tells(given):
        inside = [each for each in _inside(given, {id(given)}) if _tells(each)]
        return [Followed(given, tuple(inside))]  # type: ignore[arg-type]
    if not _looks_like_one(given):
        return []
    found: list[Followed] = []
    for each in _inside(given, {id(given)}):
        if _tells(each) and not any(each is part for one in found for part in one.all):
            found += followed(each)
    return [Followed(one.optimizer, one.inside, type(given).__name__) for one in found]


def _tells(given: object) -> bool:
    """Whether it calls step hooks: some wrappers inherit from `Optimizer` without being one."""
    if not isinstance(given, Optimizer):
        return False
    try:
        given.register_step_pre_hook(_nothing).remove()
    except AttributeError:  # its __init__ was not called
        return False
    return True


def _nothing(*_: object) -> None: ...


def _looks_like_one(given: Any) -> bool:
    """A learning rate scheduler, say, has no parameter groups."""
    try:
        return callable(getattr(given, "step", None)) and hasattr(given, "param_groups")
    except Exception:  # a property of the user's that raises
        return False


def _inside(given: object, seen: set[int]) -> Iterator[object]:
    """Optimizers and wrappers among the attributes of ``given``, also in lists, outermost first."""
    for value in list(getattr(given, "__dict__", {}).values()):
        several = value.values() if isinstance(value, dict) else value
        for each in several if isinstance(value, (list, tuple, dict)) else (value,):
            if id(each) not in seen and not isinstance(each, type) and _looks_like_one(each):
                seen.add(id(each))
                yield each
                yield from _inside(each, seen)
