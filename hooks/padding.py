"""Which positions of a batch are real, and which were only filled in to make its rows equally long."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MaskSpec = str | Tensor | Callable[[tuple[Any, ...], Mapping[str, Any]], Tensor | None]


@dataclass(frozen=True)
class Mask:
    """Real positions of a batch: ``shape`` (batch, tokens), ``index`` of each in the flat batch."""

    shape: tuple[int, int]
    index: Tensor

    @classmethod
    def of(cls, given: Tensor) -> "Mask":
        """Of (batch, tokens) in which real positions are True or 1."""
        if given.ndim != 2:
            raise ValueError(f"the mask has shape {tuple(given.shape)}: give (batch, tokens)")
        # On an accelerator this waits, once in a forward that is recorded.
        index = (given.detach() != 0).flatten().nonzero().squeeze(1)
        return cls((given.shape[0], given.shape[1]), index)

    def select(self, x: Tensor, layout: str) -> Tensor | None:
        """The real positions of an output, (position, channel); None where it has no such axes."""
        seen = self._batch_first(x, layout)
        if seen is None:
            return None
        return seen.flatten(0, 1).flatten(1).index_select(0, self.index.to(x.device))

    def _batch_first(self, x: Tensor, layout: str) -> Tensor | None:
        """``x`` as (batch, tokens, anything), or None."""
        batch, tokens = self.shape
        shape = tuple(x.shape)
        if layout == "bct" and x.ndim > 2 and (shape[0], math.prod(shape[2:])) == self.shape:
            return x.flatten(2).transpose(1, 2)
        if layout == "tbc" and shape[:2] == (tokens, batch):
            return x.transpose(0, 1).reshape(batch, tokens, -1)
        if shape[:2] == self.shape:
            return x.reshape(batch, tokens, -1)
        if x.ndim == 4 and (shape[0], shape[2]) == self.shape:  # a head at a time
            return x.transpose(1, 2)
        if shape and shape[0] == batch * tokens:
            return x.reshape(batch, tokens, -1)
        return None

    def misses(self, x: Tensor) -> bool:
        """Whether an output that it does not fit has positions at all, padded ones among them."""
        pooled = x.ndim < 3 and len(x) == self.shape[0]
        packed = x.ndim > 0 and len(x) == len(self.index)
        return not (pooled or packed)

    def places(self, top: Tensor) -> Tensor:
        """The largest elements (n, 4: value, channel, token, batch) of selected rows, with the token
        and the batch that they have in the whole."""
        flat = self.index.to(top.device)[top[:, 3].long().clamp(min=0)]
        found = top.clone()
        found[:, 2], found[:, 3] = flat % self.shape[1], flat // self.shape[1]
        return torch.where(top[:, :1].isnan(), top, found)


class Padding:
    """Finds the mask of a forward in what the model is called with.

    ``spec``: the name of an argument of the model, a function of ``(args, kwargs)`` that gives a
    mask or None, or a tensor that the training loop overwrites for each batch.
    """

    def __init__(self, spec: MaskSpec) -> None:
        self._spec = spec

    def of(self, module: nn.Module, args: Any, kwargs: Any) -> Mask | None:
        spec = self._spec
        if isinstance(spec, str):
            given = kwargs.get(spec)
            if given is None and args:
                bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
                given = bound.arguments.get(spec)
        else:
            given = spec if isinstance(spec, Tensor) else spec(args, kwargs)
        return None if given is None else Mask.of(given)
