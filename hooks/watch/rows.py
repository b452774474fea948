"""The rows of a tally: what is observed of which module, and what of it has been seen so far."""

import threading
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["site", "size", "input"]


@dataclass(frozen=True)
class Stream:
    """One of ``count`` residual streams that lie along an axis of a block's output.

    Where the axis is longer than that, streams are folded into it, innermost: (batch * stream).
    """

    index: int
    count: int
    axis: int

    def of(self, x: Tensor) -> Tensor:
        """A view of this stream; raises `ValueError` where the axis does not hold them."""
        folded, rest = divmod(x.shape[self.axis], self.count)
        if rest or not folded:
            raise ValueError(f"axis {self.axis} of {tuple(x.shape)} holds no {self.count} streams")
        axis = self.axis % x.ndim
        if folded == 1:
            return x.select(axis, self.index)
        unfolded: Tensor = x.unflatten(axis, (folded, self.count))
        return unfolded.select(axis + 1, self.index)


@dataclass
class Row:
    """A row of the tally: a site, or a place of which only the size of its output or input is
    taken because a site's branch_ratio needs it.
    """

    path: str
    layout: str = "btc"
    kind: Kind = "site"
    paired: bool = False  # the angle to the module's own input is measured
    stream: "Stream | None" = None  # of several residual streams in the module's output, this one
    dtypes: list[torch.dtype] = field(default_factory=list)  # of its outputs, as they first came
    speechless: bool = False  # called, with no floating tensor in its output that can be read
    counted: bool = False  # in this step, by a forward that was no recomputation
    trained: bool = False  # in this step, by a forward that was not under no_grad
    aside: bool = False  # in this step, by one that was
    expects_gradient: bool = False
    quiet: bool = False

    @property
    def module(self) -> str:
        """The path of the module whose output this is."""
        return self.path if self.stream is None else self.path.rpartition("[")[0]

    def part(self, x: Tensor) -> Tensor:
        """What of the module's output, or of its gradient, belongs to this row."""
        return x if self.stream is None else self.stream.of(x)


class Switch:
    """Whether hooks observe: the one thing that a compiled graph is guarded on."""

    def __init__(self) -> None:
        self.armed = False


class Pass(threading.local):
    """The forward that this thread is in: its outermost module, and the grad mode there.

    ``observing``: this thread is in `Observer.observe`, perhaps in a metric of the user's own, and
    whatever that one calls is not the training's.
    """

    module: nn.Module | None = None
    training: bool | None = None
    observing: bool = False
