"""What gradients were before they were clipped: read where PyTorch's own clipping begins."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from dynscope.hooks.tensor.private import CLIPPING, sort_gradients

Squares = tuple[Tensor | float, Tensor | float, Tensor | float]
"""Sum of squares, non-finite count and largest magnitude of a gradient."""

Given = Sequence[Tensor | None]


class ClippingHook:
    """Calls ``then`` with the gradients that are about to be clipped, until it is removed.

    Only a call of `clip_grad_norm_`, `clip_grads_with_norm_` or `clip_grad_value_` says that
    gradients are clipped: dividing them by a number of batches writes to them just so. All of them
    sort their gradients with one function before they write. It is looked up in their module, and
    while such hooks live it is found there with a look around it: however the user imported them.
    """

    def __init__(self, then: Callable[[Given], None]) -> None:
        self._then = then
        if not _hooks and sort_gradients is not None:
            setattr(clip_grad, CLIPPING, _tell_and_sort)
        _hooks.append(self)

    def tell(self, gradients: Given) -> None:
        self._then(gradients)

    def remove(self) -> None:
        if self in _hooks:
            _hooks.remove(self)
        if not _hooks and getattr(clip_grad, CLIPPING, None) is _tell_and_sort:
            setattr(clip_grad, CLIPPING, sort_gradients)


_CLIPS = {"clip_grad_norm_", "_clip_grads_with_norm_", "clip_grad_value_"}  # not `_get_total_norm`
_hooks: list[ClippingHook] = []


def _tell_and_sort(tensors: Sequence[Given], *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() and sys._getframe(1).f_code.co_name in _CLIPS:
        for hook in tuple(_hooks):
            hook.tell(tensors[0])
    return sort_gradients(tensors, *args, **kwargs)


class Reading(NamedTuple):
    """A gradient before clipping, and what is known of the loss scale in it then.

    ``scaled``: whether it was still in, as far as ``scaler`` (None: none was known) tells.
    """

    squares: Squares
    scaled: bool
    scaler: Any | None


class Unclipped:
    """What each gradient of the step in progress was when it was first clipped after a backward."""

    def __init__(self) -> None:
        self._readings: dict[int, Reading] = {}
        self._done: set[int] = set()

    def due(self, i: int) -> bool:
        """Whether a gradient has not been clipped yet since the last backward."""
        return i not in self._done

    def keep(self, i: int, reading: Reading) -> None:
        self._done.add(i)
        self._readings[i] = reading

    def renew(self) -> None:
        """Another backward adds to the gradients: what is clipped then counts."""
        self._done.clear()

    def take(self, rows: Sequence[int]) -> Iterator[tuple[int, Reading | None]]:
        """What each of ``rows`` was, None where it was not clipped; nothing if none of them was."""
        if not any(i in self._readings for i in rows):
            return
        for i in rows:
            self._done.discard(i)
            yield i, self._readings.pop(i, None)

    def finish(self) -> None:
        """The step has been taken."""
        self._readings.clear()
        self._done.clear()
