"""Which tensors a module takes and gives, and which of them can be read."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dynscope.hooks.tensor.private import is_symbolic

_PACKED = frozenset({"float4_e2m1fn_x2"})  # several numbers in an element


def observable(x: Tensor) -> bool:
    """Whether the numbers of ``x`` can be read here and now."""
    return not (is_symbolic(x) or unreadable(x))


def unreadable(x: Tensor) -> str:
    """Why a tensor of the training cannot be read, for the file to say; "" where it can."""
    if is_symbolic(x):
        return ""
    if x.is_quantized:
        return "its output is quantised"
    if x.is_meta:
        return "its output is on the meta device, which holds no numbers"
    if _dispatches(x) and not (x.is_nested or hasattr(x, "to_local")):
        return f"its output is a {type(x).__name__}, which is no ordinary tensor"
    if x.layout not in (torch.strided, torch.jagged):
        return "its output is sparse" if "sparse" in str(x.layout) else "its layout is mkldnn's"
    if str(x.dtype).removeprefix("torch.") in _PACKED:
        return f"its output is {x.dtype}, several numbers in an element"
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return "captured into a CUDA graph, whose replays call no hook"
    return ""


def _dispatches(x: Tensor) -> bool:
    """Whether operations mean something else to this class; its memory need not hold its numbers."""
    if type(x) is Tensor or type(x) is nn.Parameter:
        return False
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def local(x: Tensor) -> Tensor:
    """The numbers themselves, as an ordinary tensor: of a distributed one the part that this rank
    holds, of a nested one what is no padding.
    """
    if x.is_nested:
        holes = getattr(x, "_lengths", None) is not None
        x = torch.cat(x.unbind()) if holes else x.values()
    elif hasattr(x, "to_local"):
        x = x.to_local()
    if _dispatches(x):
        return x
    if type(x) is not Tensor:
        x = x.as_subclass(Tensor)
    if x._is_zerotensor():  # without memory
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.resolve_neg()  # conj().imag says by a bit that its memory has the other sign


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
