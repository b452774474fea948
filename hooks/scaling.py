"""What a gradient scaler's scale tells without waiting for the device."""

from typing import Any

import torch
from torch import Tensor


class Scaling:
    """Follows the loss scale of a `torch.amp.GradScaler`; None where there is none."""

    def __init__(self, scaler: Any | None) -> None:
        self._scaler = scaler
        self._before: Tensor | None = None

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
