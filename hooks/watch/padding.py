"""Which positions of a batch are real, and which were only filled in to make its rows equally long."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynscope.hooks.tensor.tensors import version

MaskSpec = str | Tensor | Callable[[tuple[Any, ...], Mapping[str, Any]], Tensor | None]


@dataclass(frozen=True)
class Mask:
    """Real positions of a batch: ``shape`` (batch, tokens), ``index`` of each in the flat batch."""

    shape: tuple[int, int]
    index: Tensor

    @classmethod
    def of(cls, given: Tensor, *, marks_padding: bool = False) -> "Mask":
        """Of (batch, tokens), perhaps with axes of length 1 after the batch, or of (tokens).

        Real positions are True or 1, or where it ``marks_padding`` False or 0.
        """
        shape = given.shape if given.ndim > 1 else (1, *given.shape)
        if len(shape) != 2 and sum(length > 1 for length in shape[1:]) > 1:
            raise ValueError(f"the mask has shape {tuple(shape)}: give (batch, tokens)")
        # On an accelerator this waits, once in a forward that is recorded.
        if given.is_floating_point() and not marks_padding and bool((given < 0).any()):
            raise ValueError("the mask has negative values: give one of ones and zeros")
        flat = given.detach().reshape(-1)
        index = ((flat == 0) if marks_padding else (flat != 0)).nonzero().squeeze(1)
        return cls((shape[0], math.prod(shape[1:])), index)

    @property
    def full(self) -> bool:
        """Whether every position is real."""
        return len(self.index) == math.prod(self.shape)

    def select(self, x: Tensor, layout: str) -> Tensor | None:
        """The real positions of an output, (position, channel) or (position, head, channel); None
        where it has no such axes."""
        seen = self._batch_first(x, layout)
        if seen is None:
            return None
        real = seen.flatten(0, 1).index_select(0, self.index.to(x.device))
        return real.flatten(1, -2) if real.ndim > 3 else real

    def _batch_first(self, x: Tensor, layout: str) -> Tensor | None:
        """``x`` as (batch, tokens, ..., channels), or None."""
        batch, tokens = self.shape
        shape = tuple(x.shape)
        if layout == "bct" and x.ndim > 2 and (shape[0], math.prod(shape[2:])) == self.shape:
            return x.flatten(2).transpose(1, 2)
        if layout == "tbc" and shape[:2] == (tokens, batch):
            return _with_channels(x.transpose(0, 1))
        if shape[:2] == self.shape:
            return _with_channels(x)
        if x.ndim == 4 and (shape[0], shape[2]) == self.shape:  # a head at a time
            return x.transpose(1, 2)
        first = (
            layout != "tbc" or min(self.shape) == 1
        )  # else which is flattened first is not known
        if shape and shape[0] == batch * tokens and first:
            return _with_channels(x.unflatten(0, self.shape))
        return None

    def misses(self, x: Tensor) -> bool:
        """Whether an output that it does not fit has positions at all, padded ones among them."""
        pooled = x.numel() < 2 or (x.ndim < 3 and len(x) == self.shape[0])
        packed = x.ndim > 0 and len(x) == len(self.index)
        return not (pooled or packed)

    def places(self, top: Tensor) -> Tensor:
        """The largest elements (n, 4: value, channel, token, batch) of selected rows, with the token
        and the batch that they have in the whole."""
        flat = self.index.to(top.device)[top[:, 3].long().clamp(min=0)]
        found = top.clone()
        found[:, 2], found[:, 3] = flat % self.shape[1], flat // self.shape[1]
        return torch.where(top[:, :1].isnan(), top, found)


def _with_channels(x: Tensor) -> Tensor:
    """A number per position is a channel."""
    return x if x.ndim > 2 else x[..., None]


def _lies(x: Tensor) -> tuple[object, ...]:
    return x.data_ptr(), x.dtype, x.shape, x.stride()


@dataclass(frozen=True)
class Unmasked:
    """Why an output counts whole though a mask was asked for, or does not count at all."""

    reason: str
    counts: bool = True


_DECODED = ("decoder", "tgt", "target")
ELSEWHERE = Unmasked(
    "it is outside of the encoder or decoder that the mask is of: all positions count (a mask given as "
    "a function or a tensor would hold for both)"
)
UNSEEN = Unmasked(
    "its forward was not seen to begin, so no mask was found: all positions count (of a compiled "
    "model, attach what torch.compile returned)"
)
UNREADABLE = Unmasked("the mask cannot be used, as an event says: all positions count")
UNKNOWN = Unmasked(
    "forwards with masks of their own before one backward: whose gradient it is is not known",
    counts=False,
)
Verdict = Mask | Unmasked | None  # None: all positions are real


class Padding:
    """Finds the masks of the forwards of a training.

    ``spec``: the name of an argument of the model, a function of ``(args, kwargs)`` that gives a
    mask or None, or a tensor that the training loop overwrites for each batch. ``now`` is what
    holds in the running forward; ``given`` the same as it was given, which compiled code takes.
    """

    def __init__(self, spec: MaskSpec) -> None:
        self._spec = spec
        # PyTorch's own key_padding_mask and src_key_padding_mask mark what is not real.
        self._marks_padding = isinstance(spec, str) and spec.endswith("key_padding_mask")
        self.now: Verdict = UNSEEN
        self.given: Tensor | None = None
        self._since_backward: list[Verdict] = []
        self._backward_ended = False
        self._last: tuple[Tensor, int, Verdict] | None = None

    def elsewhere(self, paths: Collection[str]) -> set[str]:
        """Those of ``paths`` whose mask it is not known to be.

        Encoder and decoder are padded each in its own way. A name says whose mask it is, and it is
        not asked for outside; of a function or a tensor the user knows.
        """
        if not isinstance(self._spec, str):
            return set()
        within = {
            stack: {path for path in paths if stack in path.split(".")}
            for stack in ("encoder", "decoder")
        }
        if not all(within.values()):
            return set()
        own = "decoder" if any(word in self._spec for word in _DECODED) else "encoder"
        return set(paths) - within[own]

    def position(self, module: nn.Module) -> int:
        """Where among the positional arguments of ``module`` the mask is, -1 if nowhere.

        A wrapper (compiled, distributed, with adapters) takes what the model inside takes.
        """
        try:
            names = list(inspect.signature(module.forward).parameters)
        except (TypeError, ValueError):
            return -1
        if isinstance(self._spec, str) and self._spec in names:
            return names.index(self._spec)
        inside = list(module.children())
        wraps = names == ["args", "kwargs"] or names == ["inputs", "kwargs"]
        return self.position(inside[0]) if wraps and len(inside) == 1 else -1

    def found(self, position: int, args: Any, kwargs: Any) -> Any:
        """What is given as a mask, without calling a function: torch.compile traces this."""
        spec = self._spec
        if isinstance(spec, Tensor):
            return spec
        if not isinstance(spec, str):
            return None
        if spec in kwargs:
            return kwargs[spec]
        if 0 <= position < len(args):
            return args[position]
        if args and isinstance(args[0], Mapping):  # model(batch)
            return args[0].get(spec)
        return None

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A training forward begins. Raises what a function or a mask that does not fit raises."""
        self.now, self.given = UNREADABLE, None
        try:
            if callable(self._spec) and not isinstance(self._spec, Tensor):
                given = self._spec(args, kwargs)
            else:
                given = self.found(self.position(module), args, kwargs)
            if given is None and isinstance(self._spec, str):
                reason = f"the model was called without {self._spec}: all positions count"
                self.now = Unmasked(reason)
            else:
                self.now = None if given is None else self.of(torch.as_tensor(given))
                self.given = given if isinstance(given, Tensor) else None
        finally:
            if self._backward_ended:
                self._since_backward.clear()
            self._backward_ended = False
            self._since_backward.append(self.now)

    def leave(self) -> None:
        self.now, self.given = UNSEEN, None

    def of(self, given: Tensor) -> Verdict:
        """The mask of ``given``, which is found once where it is asked for again and again."""
        if self._last is not None:
            last, state, verdict = self._last
            if _lies(last) == _lies(given) and state == version(given) != -1:
                return verdict
        mask = Mask.of(given, marks_padding=self._marks_padding)
        # It is kept, so that no other tensor can come to lie where it lies.
        self._last = given, version(given), None if mask.full else mask
        return self._last[2]

    def of_backward(self) -> Verdict:
        """What the gradients of this backward have, where hooks cannot say it."""
        return self._since_backward[0] if len(self._since_backward) == 1 else UNKNOWN

    def backward_ended(self) -> None:
        self._backward_ended = True

    def forget(self) -> None:
        """A step has been taken."""
        self._last = None
        self._since_backward.clear()
