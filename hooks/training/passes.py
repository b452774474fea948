"""Which passes belong to the coming step: not those whose gradients no step has used."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dynscope.hooks.tensor.tensors import local
from dynscope.hooks.training.scaling import Scaling


@dataclass
class Passes:
    """What happened since the last step.

    ``ended``: a backward is over that left gradients, or could reach none. ``stepping``: the
    optimizer is in its step. ``stepped``: it has been, since the last forward began. ``dropped``:
    passes were dropped on the way.
    """

    scaling: Scaling
    ended: bool = False
    stepping: bool = False
    stepped: bool = False
    dropped: bool = False

    def kept(self) -> Tensor | None:
        """Whether (0-d bool) the scaler kept what lies before the forward that begins now.

        A scale that went down means a skip, unless the optimizer did step. None: cannot be told.
        """
        kept, stepped = self.scaling.kept(), self.stepped
        self.stepped = False
        return None if stepped else kept

    def cleared(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether gradients were cleared since a backward, with no step in between.

        A discriminator's pass in the generator's step, or a batch that the loop chose to skip.
        Within an optimizer's own step (LBFGS) every evaluation counts.
        """
        if not self.ended or self.stepping:
            return False
        # Values are looked at on the host only, and a few of them: the first ones decide.
        return not any(
            g.device.type != "cpu" or g.is_sparse or bool(local(g).reshape(-1)[:4096].any())
            for g in gradients
            if g is not None
        )

    def finish(self, *, dropped: bool = False) -> None:
        """A step has been taken, or everything until now was dropped."""
        self.ended, self.dropped = False, dropped
