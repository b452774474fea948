"""The end of a backward, when every gradient of it is there and nobody has touched one yet."""

import sys
from collections.abc import Callable
from types import FrameType

import torch.utils.checkpoint

from dynscope.hooks.tensor.private import at_end_of_backward, backwards_on_the_stack


class BackwardEnd:
    """Calls ``then`` at the end of each backward in which it was woken, by a hook inside of it.

    A backward inside another one (reentrant checkpointing) has no end of its own: while it runs
    gradients are incomplete. Neither has one of compiled autograd.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then, self._asked = then, False
        self.coming = False  # whether the end of the backward that is under way will be seen

    def wake(self) -> None:
        """Ask to be called; cheap when asked again in the same backward."""
        if self._asked:
            return
        self._asked = True
        if _nested(sys._getframe(1)):
            return
        self.coming = at_end_of_backward(self._ended)

    def _ended(self) -> None:
        self._asked = self.coming = False
        self._then()

    def forget(self) -> None:
        """No backward is under way: a forward begins, or a step has been taken."""
        self._asked = self.coming = False


def _nested(frame: FrameType | None) -> bool:
    """Whether the backward was started from inside another one, as Python's stack tells."""
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return backwards_on_the_stack() > 1


_CHECKPOINT = torch.utils.checkpoint.__file__
