"""What is taken from the weights: sums, and their magnitudes counted by the float's own bits.

float32 magnitudes are rounded to 8 bits behind the leading one (at most 0.4 % apart, whatever the
scale) and counted; bfloat16 and float16 are counted exactly, one count per bit pattern. No
logarithm, no sort, no random state, no window to choose. `dynscope.weibull.derive` makes the fits
from the counts, in another process.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from dynscope import weibull

EXACT_UP_TO = 2**14
"""Parameters of at most this many elements keep every magnitude; larger ones are counted."""

# Elements worked on at a time. On the CPU they fit the cache and stay below what torch splits between
# threads, which on a busy machine would wait for each other; elsewhere the launches are kept few.
_CPU_CHUNK = 2**15
_CHUNK = 2**22


class _Bits(NamedTuple):
    """How a float is counted: its integer twin, the pattern of infinity, the bits rounded away."""

    integer: torch.dtype
    infinity: int
    dropped: int


_BITS = {
    torch.float32: _Bits(torch.int32, 0x7F800000, 15),
    torch.bfloat16: _Bits(torch.int16, 0x7F80, 0),
    torch.float16: _Bits(torch.int16, 0x7C00, 0),
}


class _Taken(NamedTuple):
    """One parameter on its way to the host; the copies may still be under way."""

    reason: str
    numel: int = 0
    sums: torch.Tensor | None = None  # sum, sum of squares, absmax of the finite values, float64
    magnitudes: torch.Tensor | None = None  # every magnitude of a small parameter, float32
    counts: torch.Tensor | None = None  # or the count of each bit pattern
    counted: torch.dtype = torch.float32


@torch.no_grad()
def collect(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, NDArray[Any]]:
    """Take what `dynscope.weibull.derive` needs from named parameters, in their order.

    Returns flat arrays. Per parameter: ``numel``, ``sum``, ``sum_squares`` and ``absmax`` of its
    finite values (float64; NaN where there are no values to read) and ``reason`` (an index into
    `dynscope.weibull.REASONS`; 0 where a fit may be tried). Parameter i has the distinct or single
    magnitudes ``values[offsets[i]:offsets[i + 1]]`` (float32, inf for any non-finite value of a
    counted parameter), with their ``counts``.

    On CUDA everything is queued and waited for once per device.
    """
    taken, devices = [], set()
    for _, tensor in parameters:  # one at a time: a part may be a copy, made when it is asked for
        taken.append(_take(tensor))
        if tensor.is_cuda:
            devices.add(tensor.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    found = [_magnitudes(one) for one in taken]
    nothing = np.full(3, np.nan)
    sums = np.array([nothing if one.sums is None else one.sums.numpy() for one in taken])
    sums = sums.reshape(len(taken), 3)
    empty = (np.empty(0, np.float32), np.empty(0, np.int64))
    return {
        "numel": np.array([one.numel for one in taken], np.int64),
        "sum": sums[:, 0],
        "sum_squares": sums[:, 1],
        "absmax": sums[:, 2],
        "reason": np.array([weibull.REASONS.index(one.reason) for one in taken], np.int8),
        "offsets": np.cumsum([0, *(len(values) for values, _ in found)], dtype=np.int64),
        "values": np.concatenate([empty[0], *(values for values, _ in found)]),
        "counts": np.concatenate([empty[1], *(counts for _, counts in found)]),
    }


def _take(tensor: torch.Tensor) -> _Taken:
    """Queue the work for one parameter without waiting for it."""
    reason = _unreadable(tensor)
    if reason:
        return _Taken(reason)
    flat = tensor.detach().reshape(-1)
    taken = _Taken(
        reason=weibull.NOT_A_MATRIX if tensor.ndim < 2 else weibull.FINE,
        numel=flat.numel(),
        sums=_to_host(_sums(flat)),
        counted=flat.dtype if flat.dtype in _BITS else torch.float32,
    )
    if flat.numel() <= EXACT_UP_TO:
        return taken._replace(magnitudes=_to_host(flat.abs().float()))
    return taken._replace(counts=_to_host(_count(flat, _BITS[taken.counted])))


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a parameter can be read as weights."""
    return _unreadable(tensor) == weibull.FINE


def _unreadable(tensor: torch.Tensor) -> str:
    """Why the numbers of a parameter cannot be read as weights, or "" when they can."""
    if is_lazy(tensor) or tensor.is_meta:
        return weibull.NO_VALUES
    if hasattr(tensor, "__tensor_flatten__"):  # DTensor, torchao: what is stored is not the weight
        return weibull.WRAPPED
    if tensor.layout != torch.strided:
        return weibull.SPARSE
    if tensor.is_quantized or not tensor.is_floating_point() or tensor.itemsize < 2:
        return weibull.QUANTISED
    return weibull.FINE


def _sums(flat: torch.Tensor) -> torch.Tensor:
    """Sum, sum of squares and largest magnitude of the finite values."""
    sums = torch.zeros(3, dtype=torch.float64, device=flat.device)
    for chunk in _chunks(flat):
        finite = chunk.nan_to_num(0.0, 0.0, 0.0)
        low, high = finite.aminmax()
        wide = finite.double()
        sums[0] += wide.sum()
        sums[1] += wide.square_().sum()  # not `dot`: BLAS would bring its own threads
        sums[2] = torch.maximum(sums[2], torch.maximum(-low, high))
    return sums


def _count(flat: torch.Tensor, bits: _Bits) -> torch.Tensor:
    """How often each rounded bit pattern of a magnitude occurs; the last bin is not finite."""
    bins = (bits.infinity >> bits.dropped) + 1
    counts = torch.empty(bins, dtype=torch.int64, device=flat.device)
    for part in _chunks(counts):
        part.zero_()
    one = torch.ones((), dtype=torch.int64, device=flat.device)
    for chunk in _chunks(flat):
        values = chunk if chunk.dtype in _BITS else chunk.float()
        # NaN patterns lie above infinity's: clamped, so that rounding cannot overflow.
        pattern = values.view(bits.integer).int().bitwise_and(torch.iinfo(bits.integer).max)
        pattern.clamp_(max=bits.infinity).add_((1 << bits.dropped) >> 1)
        pattern.bitwise_right_shift_(bits.dropped)
        counts.index_add_(0, pattern, one.expand(pattern.numel()))
    return counts


def _chunks(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    size = _CHUNK if flat.device.type != "cpu" else _CPU_CHUNK
    return torch.split(flat, size) if flat.numel() else ()


def _magnitudes(taken: _Taken) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if taken.magnitudes is not None:
        return taken.magnitudes.numpy(), np.ones(taken.numel, np.int64)
    if taken.counts is None:
        return np.empty(0, np.float32), np.empty(0, np.int64)
    counts: NDArray[np.int64] = taken.counts.numpy()
    seen = np.flatnonzero(counts)
    return _pattern_values(taken.counted)[seen], counts[seen]


@cache
def _pattern_values(dtype: torch.dtype) -> NDArray[np.float32]:
    """The magnitude that each bin of `_count` stands for."""
    bits = _BITS[dtype]
    bins = (bits.infinity >> bits.dropped) + 1
    pattern = torch.arange(bins, dtype=torch.int32, device="cpu") << bits.dropped
    values: NDArray[np.float32] = pattern.to(bits.integer).view(dtype).float().numpy()
    return values


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    # From CUDA this goes to pinned memory and returns at once: `collect` waits for all of them.
    return tensor.to("cpu", non_blocking=tensor.is_cuda)
