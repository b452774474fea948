"""What is measured of a tensor, in plain PyTorch: on any device, without waiting for it.

`dynscope.hooks.fused` does the same in one visit to memory where a C compiler is found.
Everything here runs under ``no_grad`` on detached tensors and never uses random state.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from dynscope.tally import BINS, BINS_PER_OCTAVE, FIRST_OCTAVE

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
def sparse_stride(shape: tuple[int, ...], at_most: int) -> int:
    """The smallest stride coprime to every axis that keeps no more than ``at_most`` elements."""
    stride = max(1, math.ceil(math.prod(shape) / at_most))
    while not _coprime(stride, shape):
        stride += 1
    return stride


def histogram(x: Tensor, stride: int) -> Tensor:
    """Counts of the magnitudes of every ``stride``-th element in 4,096 logarithmic bins: int32.

    The bins are those of `dynscope.tally.bin_edges`; non-finite elements are left out. The index
    comes from the bits of the float itself: exponent and six leading bits of the mantissa.
    """
    sample = x.flatten()[::stride].float()
    shift = 23 - BINS_PER_OCTAVE.bit_length() + 1
    first = (127 + FIRST_OCTAVE) * BINS_PER_OCTAVE
    bins = ((sample.view(torch.int32) & 0x7FFFFFFF) >> shift).sub_(first).clamp_(0, BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.int32, device=x.device)
    return counts.scatter_add_(0, bins.long(), torch.isfinite(sample).to(torch.int32))


def median(counts: Tensor) -> Tensor:
    """Median magnitude of one histogram, as `dynscope.tally.median_of_histogram`: 0-d float64."""
    below = counts.cumsum(0, dtype=torch.float64)
    half = below[-1] / 2
    index = (below < half).sum().clamp(max=BINS - 1).view(1)
    here, reached = counts.gather(0, index).double(), below.gather(0, index)
    inside = (half - (reached - here)) / here
    octave, step = index // BINS_PER_OCTAVE, index % BINS_PER_OCTAVE
    low = torch.ldexp(1 + step.double() / BINS_PER_OCTAVE, octave + FIRST_OCTAVE)
    growth = (BINS_PER_OCTAVE + step + 1.0).double() / (BINS_PER_OCTAVE + step)
    return torch.where(index == 0, 0.0, low * growth**inside)[0]


def top_three(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and flat indices of the three finite elements of largest magnitude.

    Missing ones (fewer than three finite elements) have the value 0 and the index -1.
    """
    flat = x.flatten()
    magnitude = torch.where(torch.isfinite(flat), flat.abs(), -1.0)
    found, index = magnitude.topk(min(3, flat.numel()))
    index = torch.where(found < 0, -1, index)
    values = torch.where(index < 0, 0.0, flat[index.clamp(min=0)].double())
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


def moments(x: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """The sums of the standard bundle, and ``absmax``, of a floating tensor: 0-d float64 each."""
    wide = x if x.dtype == torch.float64 else x.float()
    magnitude = wide.abs()
    variance, mean = torch.var_mean(wide, correction=0)
    absmax = magnitude.amax()
    bar = (_TIMES_MEDIAN * median(counts)).clamp(min=_MASSIVE)
    n, mean = float(x.numel()), mean.double()
    return {
        "sum": n * mean,
        "squares": n * (variance.double() + mean.square()),
        "abs": magnitude.sum(dtype=torch.float64),
        "zeros": (wide == 0).sum().double(),
        "nonfinite": (~torch.isfinite(wide)).sum().double(),
        "massive": ((magnitude > _MASSIVE) & (magnitude >= bar)).sum().double(),
        "absmax": absmax.double(),
    }


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
    wide = x.double() if x.dtype == torch.float64 else x.float()
    norm = torch.linalg.vector_norm(wide, dtype=torch.float64)
    return torch.stack(
        [norm.square(), (~torch.isfinite(wide)).sum().double(), wide.abs().amax().double()]
    )
