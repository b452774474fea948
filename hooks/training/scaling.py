"""What a gradient scaler's scale tells without waiting for the device."""

import gc
import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from dynscope.hooks.tensor.private import SCALER_STEPS, UNSCALED


class Scaling:
    """Follows the loss scale of a `torch.amp.GradScaler`; None where there is none.

    Which one is ``given``, or found when it calls the optimizer. What was not given is followed as
    long as it does so; one that takes its place is followed instead.
    """

    def __init__(self, given: Any | None) -> None:
        self.scaler, self._given = given, given is not None
        self._before: Tensor | None = None
        self._since = _scales() if given is None else weakref.WeakKeyDictionary()

    def find(self, optimizer: object, *, alone: bool) -> bool:
        """Take the scaler that is calling the optimizer right now; whether another one was found.

        An optimizer that steps ``alone`` and without the scaler that was found is not scaled any more.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in SCALER_STEPS:
            frame = frame.f_back
        if frame is None:
            if not self._given and alone and not self._has_unscaled(self.scaler, [optimizer]):
                self._take(None)
            return False
        return self._take(frame.f_locals.get("self"))

    def _take(self, scaler: Any | None) -> bool:
        if scaler is self.scaler:
            return False
        self.scaler, self._before = scaler, None
        return True

    def has_skipped(self) -> bool:
        """Whether the scale is below that which the scaler had when recording began, or began with
        since then (never waits: host only)."""
        scale, initial = self.scale(), getattr(self.scaler, "_init_scale", None)
        if scale is None or initial is None or scale.device.type != "cpu":
            return False
        return bool(scale < self._since.get(self.scaler, initial))

    def scale(self) -> Tensor | None:
        """The loss scale, also before its first use; None where the scaler is disabled."""
        return _scale(self.scaler)

    def left_in(self, optimizers: Iterable[object]) -> bool:
        """Whether gradients of ``optimizers`` still hold the loss scale, before they step."""
        optimizers = list(optimizers)
        if self.scaler is None:
            for scaler in list(self._since):
                if self._has_unscaled(scaler, optimizers):
                    self._take(scaler)
        return self.scale() is not None and not self._has_unscaled(self.scaler, optimizers)

    @staticmethod
    def _has_unscaled(scaler: Any | None, optimizers: Iterable[object]) -> bool:
        """Of any optimizer where none are known."""
        states = getattr(scaler, "_per_optimizer_states", {})
        known = {id(optimizer) for optimizer in optimizers} or set(states)
        return any(states[each]["stage"] is UNSCALED for each in known & set(states))

    def kept(self) -> Tensor | None:
        """Whether the scale (0-d bool) has not gone down since the last call: no step was skipped.

        None where that cannot be told.
        """
        scale = self.scale()
        if scale is None:
            return None
        before, self._before = self._before, scale.detach().clone()
        return None if before is None else scale >= before.to(scale.device)

    def forget(self) -> None:
        """A skip is known already: the scale's going down will tell of this very one."""
        self._before = None


def _scale(scaler: Any | None) -> Tensor | None:
    if not getattr(scaler, "_enabled", True):
        return None
    scale, initial = (getattr(scaler, x, None) for x in ("_scale", "_init_scale"))
    if scale is None and initial is not None:
        return torch.tensor(float(initial), device="cpu")
    return scale if isinstance(scale, Tensor) else None


def _scales() -> "weakref.WeakKeyDictionary[Any, Tensor]":
    """The scale that every scaler has now: which one will be used is not known yet.

    Without it, one that has skipped steps long ago would look like one that has just done so.
    """
    found: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
    for each in gc.get_objects():
        if issubclass(type(each), GradScaler) and (scale := _scale(each)) is not None:
            found[each] = scale.detach().clone()
    return found
