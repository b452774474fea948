"""What a gradient scaler's scale tells without waiting for the device."""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler


class Scaling:
    """Follows the loss scale of a `torch.amp.GradScaler`; None where there is none."""

    def __init__(self, scaler: Any | None) -> None:
        self._scaler = scaler
        self._before: Tensor | None = None

    def find(self) -> bool:
        """Take the scaler that is calling the optimizer right now; whether one was found.

        Whether it has skipped steps before is known then too, by what its scale began with.
        """
        if self._scaler is not None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in _STEPS:
            frame = frame.f_back
        self._scaler = frame and frame.f_locals.get("self")
        return self._scaler is not None

    def has_skipped(self) -> bool:
        """Whether the scale is below that which the scaler began with (never waits: host only)."""
        scale, initial = self.scale(), getattr(self._scaler, "_init_scale", None)
        if scale is None or initial is None or scale.device.type != "cpu":
            return False
        return bool(scale < initial)

    def scale(self) -> Tensor | None:
        """The loss scale, also before its first use; None where the scaler is disabled."""
        scale, initial = (getattr(self._scaler, x, None) for x in ("_scale", "_init_scale"))
        if scale is None and initial is not None:
            return torch.tensor(float(initial), device="cpu")
        return scale if isinstance(scale, Tensor) else None

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


_STEPS = (GradScaler.step.__code__, GradScaler._maybe_opt_step.__code__)
