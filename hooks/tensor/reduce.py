"""What is measured of a tensor, in plain PyTorch: on any device, without waiting for it.

`dynscope.hooks.tensor.fused` does the same in one visit to memory where a C compiler is found.
Everything here runs under ``no_grad`` on detached tensors and never uses random state.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from dynscope.analysis.sums import BINS, BINS_PER_OCTAVE, FIRST_OCTAVE

AT_LEAST = 2**17
_MASSIVE, _TIMES_MEDIAN, _FP16_MAX = 100.0, 1000.0, 65504.0


def _coprime(stride: int, shape: tuple[int, ...]) -> bool:
    """Sharing a factor with an axis would visit the same channels again and again."""
    return all(math.gcd(stride, length) == 1 for length in shape if length > 1)


@lru_cache(maxsize=4096)
def sample_stride(shape: tuple[int, ...], at_least: int = AT_LEAST) -> int:
    """The largest stride coprime to every axis that keeps ``at_least`` elements, or all."""
    stride = max(1, math.prod(shape) // at_least)
    while not _coprime(stride, shape):
        stride -= 1
    return stride


@lru_cache(maxsize=4096)
def sparse_stride(size: int, shape: tuple[int, ...], at_most: int) -> int:
    """The smallest stride coprime to every axis that keeps at most ``at_most`` of ``size``."""
    stride = max(1, math.ceil(size / at_most))
    while not _coprime(stride, shape):
        stride += 1
    return stride


def histogram(x: Tensor, stride: int) -> Tensor:
    """Counts of the magnitudes of every ``stride``-th element in 4,096 logarithmic bins: int32.

    The bins are those of `dynscope.analysis.sums.bin_edges`; non-finite elements are left out. The index
    comes from the bits of the float itself: exponent and six leading bits of the mantissa.
    """
    sample = x.flatten()[::stride].float()
    shift = 23 - BINS_PER_OCTAVE.bit_length() + 1
    first = (127 + FIRST_OCTAVE) * BINS_PER_OCTAVE
    infinite = (255 * BINS_PER_OCTAVE) - first
    bins = ((sample.view(torch.int32) & 0x7FFFFFFF) >> shift).sub_(first)
    bins = torch.where(bins >= infinite, BINS, bins.clamp_(0, BINS - 1))
    if x.device.type == "cpu":
        return torch.bincount(bins, minlength=BINS + 1)[:BINS].to(torch.int32)
    counts = torch.zeros(BINS + 1, dtype=torch.int32, device=x.device)
    return counts.scatter_add_(0, bins.long(), torch.ones_like(bins))[:BINS]


def median(counts: Tensor) -> Tensor:
    """Median magnitude of one histogram, as `dynscope.analysis.sums.median_of_histogram`: 0-d float64."""
    below = counts.cumsum(0, dtype=torch.float64)
    half = below[-1] / 2
    index = (below < half).sum().clamp(max=BINS - 1).view(1)
    here, reached = counts.gather(0, index).double(), below.gather(0, index)
    inside = (half - (reached - here)) / here
    octave, step = index // BINS_PER_OCTAVE, index % BINS_PER_OCTAVE
    low = torch.ldexp(1 + step.double() / BINS_PER_OCTAVE, octave + FIRST_OCTAVE)
    growth = (BINS_PER_OCTAVE + step + 1.0).double() / (BINS_PER_OCTAVE + step)
    return torch.where(index == 0, 0.0, low * growth**inside)[0]


def top_three(rows: Tensor, extent: Tensor) -> tuple[Tensor, Tensor]:
    """Values and flat indices of the three finite elements of largest magnitude.

    ``extent`` is the largest finite magnitude of each row: the three lie in the three rows where
    it is largest. Missing ones (fewer than three elements) have the value 0 and the index -1.
    """
    _, leading = extent.topk(min(3, len(extent)))
    candidates = rows[leading].double()
    magnitude = torch.where(torch.isfinite(candidates), candidates.abs(), -1.0).flatten()
    found, place = magnitude.topk(min(3, magnitude.numel()))
    index = leading[place // rows.shape[1]] * rows.shape[1] + place % rows.shape[1]
    index = torch.where(found < 0, -1, index)
    values = torch.where(index < 0, 0.0, candidates.flatten()[place])
    missing = 3 - index.numel()
    return (
        torch.nn.functional.pad(values, (0, missing)),
        torch.nn.functional.pad(index, (0, missing), value=-1),
    )


def angle(x: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """Sums over rows of the angle between ``x`` and ``reference``, in half turns, and its cosine.

    By 2 arcsin(|u - v| / 2) of the unit vectors u and v, which stays accurate at small angles,
    where the arccos of a cosine near one does not. Zero rows have no direction and are left out.
    """
    a, b = (t.reshape(-1, t.shape[-1]).double() for t in (x, reference))
    squares = b.square().sum()
    norm_a, norm_b = a.norm(dim=1), b.norm(dim=1)
    usable = (norm_a > 0) & (norm_b > 0)
    u, v = a / norm_a[:, None], b / norm_b[:, None]
    turn = 2 * torch.asin(((u - v).norm(dim=1) / 2).clamp(max=1))
    return {
        "tokens": usable.sum().double(),
        "angle": torch.where(usable, turn, 0.0).sum() / math.pi,
        "cosine": torch.where(usable, turn.cos(), 0.0).sum(),
        "input_squares": squares,
    }


def as_rows(x: Tensor) -> Tensor:
    """The elements as (rows, columns) with the last axis as columns; at least float32."""
    rows = x.reshape(-1, x.shape[-1] if x.dim() > 1 else x.numel())
    return rows if x.dtype == torch.float64 else rows.float()


def moments(rows: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """The sums of the standard bundle, and ``absmax``, of a floating tensor: 0-d float64 each.

    Row by row: squares are summed about a value close to each row's own mean.
    """
    absmax = _absmax(rows)
    centre = rows.mean(dim=1, keepdim=True)
    apart = rows - centre
    squares = torch.linalg.vector_norm(apart, dim=1, dtype=torch.float64).square()
    rest, centre, n = apart.sum(dim=1).double(), centre[:, 0].double(), rows.shape[1]
    return {
        "sum": (n * centre + rest).sum(),
        "squares": (squares + 2 * centre * rest + n * centre.square()).sum(),
        "abs": rows.abs().sum(dim=1).double().sum(),
        "zeros": (rows.numel() - torch.count_nonzero(rows)).double(),
        "nonfinite": _nonfinite(rows, absmax),
        "massive": _massive(rows, absmax, counts),
        "absmax": absmax,
    }


def _absmax(x: Tensor) -> Tensor:
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).double()


def _nonfinite(x: Tensor, absmax: Tensor) -> Tensor:
    """Number of NaN and infinite elements; a CPU need not look where the largest is finite."""
    if x.device.type == "cpu" and bool(torch.isfinite(absmax)):
        return torch.zeros((), dtype=torch.float64)
    return (~torch.isfinite(x)).sum().double()


def _massive(x: Tensor, absmax: Tensor, counts: Tensor) -> Tensor:
    """Elements above 100 and above 1000 times the median of ``counts``."""
    if x.device.type == "cpu" and bool(absmax <= _MASSIVE):
        return torch.zeros((), dtype=torch.float64)
    magnitude, bar = x.abs(), _TIMES_MEDIAN * median(counts)
    return ((magnitude > _MASSIVE) & (magnitude >= bar)).sum().double()


def extent(rows: Tensor) -> Tensor:
    """Largest finite magnitude of each row, -1 where none is finite."""
    low, high = torch.aminmax(rows, dim=1)
    largest = torch.maximum(-low, high)
    if rows.device.type == "cpu" and bool(torch.isfinite(largest).all()):
        return largest
    return torch.where(torch.isfinite(rows), rows.abs(), -1.0).amax(dim=1)


def higher_moments(x: Tensor) -> dict[str, Tensor]:
    """What the full bundle adds: overflow, third and fourth powers, the energy of row means."""
    wide = x.double()
    rows = wide.reshape(-1, wide.shape[-1]) if wide.dim() else wide.reshape(1, 1)
    mean, square = rows.mean(dim=1), rows.square().mean(dim=1)
    energy = torch.where(square > 0, mean.square() / square, 0.0)
    return {
        "overflow": (wide.abs() > _FP16_MAX).sum().double(),
        "cubes": wide.pow(3).sum(),
        "fourths": wide.pow(4).sum(),
        "mean_energy": energy.sum(),
        "rows": torch.full((), float(rows.shape[0]), dtype=torch.float64, device=x.device),
    }


def squares(x: Tensor) -> Tensor:
    """Sum of squares, non-finite count and largest magnitude: shape (3), float64."""
    rows = as_rows(x)
    absmax = _absmax(rows)
    total = torch.linalg.vector_norm(rows, dtype=torch.float64).square()
    return torch.stack([total, _nonfinite(rows, absmax), absmax])
