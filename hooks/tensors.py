"""Which tensors a module takes and gives, and which of them can be read."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.utils.rnn import PackedSequence


def observable(x: Tensor) -> bool:
    return not (
        torch._C._functorch.is_functorch_wrapped_tensor(x)
        or x.is_quantized
        or x.is_meta
        or x.is_sparse
        or isinstance(x, FakeTensor)
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def unreadable(x: Tensor) -> str:
    """Why a tensor of the training cannot be read, for the file to say; "" where there is no need."""
    if x.is_quantized:
        return "its output is quantised"
    if x.is_sparse:
        return "its output is sparse"
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return "captured into a CUDA graph, whose replays call no hook"
    return ""


def local(x: Tensor) -> Tensor:
    """The part of a distributed tensor that this rank holds; of a nested one what is no padding."""
    if x.is_nested:
        return x.values()
    return x.to_local() if hasattr(x, "to_local") else x


def version(x: Tensor) -> int:
    """Changes when ``x`` is written to; tensors made in inference mode do not keep count."""
    return -1 if x.is_inference() else x._version


def comparable(x: Tensor, reference: Tensor | None) -> Tensor | None:
    """The block's input, unless it has another shape or was overwritten by the output."""
    if reference is None or reference.shape != x.shape or reference.data_ptr() == x.data_ptr():
        return None
    return local(reference)


def floating(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif depth < 4:
        if isinstance(value, Mapping):
            children = list(value.values())
        elif isinstance(value, (tuple, list)):
            children = list(value)
        elif is_dataclass(value) and not isinstance(value, type):
            children = [getattr(value, each.name, None) for each in fields(value)]
        else:
            return
        for child in children:
            yield from floating(child, depth + 1)


def primary(value: Any) -> Tensor | None:
    """The tensor that stands for a module's output: the first floating one, in order.

    Tuples, lists, mappings, dataclasses and packed sequences are walked in the order of their
    items; integer tensors, None and caches are passed over.
    """
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    return next(floating(value), None)
