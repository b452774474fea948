"""How often each magnitude occurs among some weights: all that any of the fits needs.

Few floats are sorted. Of many, 16-bit and 8-bit ones have so few magnitudes that each is counted as it
is (`dynscope.weibull.patterns`), and wider ones are counted by their leading bits
(`dynscope.weibull.buckets`). The loops are compiled where numba is installed.
"""

import io
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynscope.errors import InputError
from dynscope.weibull.buckets import FORMATS, Buckets, merged
from dynscope.weibull.loops import loops
from dynscope.weibull.patterns import count_narrow
from dynscope.weibull.pieces import pieces
from dynscope.weibull.reasons import FINE, QUANTISED

Array = NDArray[Any]
Floats = NDArray[np.float64]

SORTED_BELOW = 32_000
"""Fewer floats than this are sorted: that is faster."""

EXACT_BELOW = 1_000_000
"""Fewer wide floats than this are sorted too where buckets are too coarse for them."""

_TOO_COARSE = 5e-4  # chance that two values lie in one bucket and are unlike; Gaussian ones: 1e-4

_MOST_LEVELS = 1 << 17  # of a histogram of many values
_MAGIC = b"dynscope histogram 1\n"


@dataclass(frozen=True)
class Histogram:
    """Finite magnitudes and how often each occurs, with sums over the signed values.

    ``levels`` (m,) are the distinct finite magnitudes, ascending, without zero; ``counts`` (m,)
    their numbers. ``sum``, ``sum_squares`` and ``absmax`` are over the finite values as they were,
    before any rounding. A level may be the mean of several magnitudes that are alike in 13 bits or more
    (`dynscope.weibull.buckets`). ``log_bins`` (1024,) are the magnitudes counted as the binned protocol does,
    where that was asked for. ``reason`` says why nothing was counted, or is empty. ``a + b`` is the
    histogram of both together.
    """

    levels: Floats
    counts: NDArray[np.int64]
    zeros: int = 0
    nonfinite: int = 0
    sum: float = 0.0
    sum_squares: float = 0.0
    absmax: float = 0.0
    reason: str = FINE
    log_bins: NDArray[np.int64] | None = None

    @classmethod
    def of_counts(cls, values: Array, counts: Array) -> "Histogram":
        """Of magnitudes in any order, with repetitions, zeros and what is not finite; no sums."""
        levels, sizes = np.asarray(values, np.float64), np.asarray(counts, np.int64)
        if not (levels[1:] > levels[:-1]).all():
            levels, place = np.unique(levels, return_inverse=True)
            sizes = np.bincount(place, weights=sizes).astype(np.int64)
        finite = np.isfinite(levels)
        used = finite & (levels > 0)
        zeros, nonfinite = int(sizes[levels == 0].sum()), int(sizes[~finite].sum())
        return cls(levels[used], sizes[used], zeros, nonfinite)

    @cached_property
    def n(self) -> int:
        """Finite values other than zero."""
        return int(self.counts.sum())

    @property
    def finite(self) -> int:
        return self.n + self.zeros

    @property
    def total(self) -> int:
        return self.finite + self.nonfinite

    def __add__(self, other: "Histogram") -> "Histogram":
        levels, place = np.unique(np.concatenate([self.levels, other.levels]), return_inverse=True)
        weights = np.concatenate([self.counts, other.counts])
        counts = np.bincount(place, weights=weights, minlength=len(levels)).astype(np.int64)
        if len(levels) > _MOST_LEVELS and counts.sum() >= EXACT_BELOW:
            levels, counts = merged(levels, counts)
        return Histogram(
            levels,
            counts,
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.sum + other.sum,
            self.sum_squares + other.sum_squares,
            max(self.absmax, other.absmax),
            self.reason if self.reason == other.reason else FINE,
            _both(self.log_bins, other.log_bins),
        )

    def condensed(self) -> "Histogram":
        """At most 256 levels per octave, each the mean of what it stands for: k moves by 1e-6 or less."""
        levels, counts = merged(self.levels, self.counts, bits=8)
        return replace(self, levels=levels, counts=counts)

    def to_bytes(self) -> bytes:
        """All of it, compressed, for `from_bytes`."""
        sums = np.array([self.sum, self.sum_squares, self.absmax])
        whole = np.array([self.zeros, self.nonfinite])
        packed = io.BytesIO()
        bins = np.empty(0, np.int64) if self.log_bins is None else self.log_bins
        for array in (self.levels, self.counts, bins, whole, sums, np.array(self.reason)):
            np.save(packed, array, allow_pickle=False)
        return _MAGIC + zlib.compress(packed.getvalue(), 1)

    @classmethod
    def from_bytes(cls, packed: bytes) -> "Histogram":
        """Raises `InputError` for what `to_bytes` did not make."""
        try:
            if not packed.startswith(_MAGIC):
                raise ValueError("its first bytes are others")
            plain = io.BytesIO(zlib.decompress(packed[len(_MAGIC) :]))
            levels, counts, bins, whole, sums, reason = (np.load(plain) for _ in range(6))
            if levels.shape != counts.shape or levels.ndim != 1:
                raise ValueError("levels and counts differ in shape")
            zeros, nonfinite = (int(each) for each in whole)
            total, squares, largest = (float(each) for each in sums)
            return cls(
                levels.astype(np.float64), counts.astype(np.int64), zeros, nonfinite,
                total, squares, largest, str(reason), bins if len(bins) else None,
            )  # fmt: skip
        except (ValueError, EOFError, OSError, TypeError, zlib.error) as error:
            raise InputError(f"no packed histogram of weights: {error}") from None


def _both(
    one: NDArray[np.int64] | None, other: NDArray[np.int64] | None
) -> NDArray[np.int64] | None:
    return None if one is None or other is None else one + other


def count(values: Array, binned: bool = False, every: bool = False) -> Histogram:
    """Count the magnitudes of an array of any shape and memory order, also a memory-mapped one.

    float16, float32, float64, and bfloat16 and the 8-bit floats of ``ml_dtypes``. Integers, bool and
    complex numbers are never taken for weights: their histogram is empty and has a ``reason``. What a
    masked array hides is left out. It is worked through in pieces: beside the array itself a few
    megabytes are needed. ``binned`` also fills ``log_bins``. ``every`` keeps every magnitude of fewer
    than a million, which takes three times as long.
    """
    values = values.compressed() if isinstance(values, np.ma.MaskedArray) else np.asarray(values)
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if not _is_float(values.dtype):
        nothing = np.empty(0), np.empty(0, np.int64)
        return Histogram(*nothing, reason=QUANTISED)
    narrow = values.dtype.itemsize <= 2
    if values.size < (EXACT_BELOW if every and not narrow else SORTED_BELOW):
        found = _count_sorted(values.astype(np.float32) if narrow else values)
    elif narrow:
        found = _count_narrow(values)
    else:
        found = _count_wide(values)
        return replace(found, log_bins=_log_bins_of(values)) if binned else found
    return replace(found, log_bins=log_bins(found.levels, found.counts)) if binned else found


def log_bins(levels: Array, counts: Array | None = None) -> NDArray[np.int64]:
    """Magnitudes in the 1,024 bins of log10 from 1e-12 to 1e2 that npm-weibull-py 0.4.0 has."""
    # Its logarithm is taken in float32, which decides on which side of an edge a value falls.
    logs = np.log10(levels.astype(np.float32))
    return np.histogram(logs, LOG_EDGES, weights=counts)[0].astype(np.int64)


LOG_EDGES = np.linspace(-12.0, 2.0, 1025)


def _sorted_levels(values: Array) -> tuple[Floats, NDArray[np.int64]]:
    """Distinct magnitudes, ascending, and how often each occurs; NaN and infinity at the end."""
    magnitudes = np.abs(values.reshape(-1))
    magnitudes.sort()
    compiled = loops(magnitudes.size)
    if compiled is not None:
        found: tuple[Floats, NDArray[np.int64]] = compiled.runs(magnitudes)
        return found
    tied = magnitudes[1:] == magnitudes[:-1]
    if not tied.any():
        return magnitudes.astype(np.float64), np.ones(len(magnitudes), np.int64)
    starts = np.flatnonzero(np.concatenate([[True], ~tied]))
    return magnitudes[starts].astype(np.float64), np.diff(starts, append=len(magnitudes))


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype in (np.float16, np.float32, np.float64) or _is_narrow(dtype)


def _is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether it is a 16-bit or 8-bit float of ml_dtypes."""
    return dtype.name == "bfloat16" or dtype.name.startswith("float8")


def _count_sorted(values: Array) -> Histogram:
    levels, counts = _sorted_levels(values)
    end = int(np.searchsorted(levels, inf))
    zeros = int(counts[0]) if end and levels[0] == 0 else 0
    start = int(zeros > 0)
    return Histogram(
        levels[start:end],
        counts[start:end],
        zeros,
        int(counts[end:].sum()),
        *_sums(values.reshape(-1)),
    )


def _count_narrow(values: Array) -> Histogram:
    levels, positive, negative = count_narrow(values)
    counts = positive + negative
    start = int(len(levels) > 0 and levels[0] == 0)
    return Histogram(
        levels[start:],
        counts[start:],
        int(counts[0]) if start else 0,
        values.size - int(counts.sum()),
        _dot(levels, (positive - negative).astype(np.float64)),
        _dot(levels**2, counts.astype(np.float64)),
        float(levels[-1]) if len(levels) else 0.0,
    )


def _count_wide(values: Array) -> Histogram:
    buckets = Buckets(values.dtype, loops(values.size))
    total = squares = absmax = 0.0
    for piece in pieces(values):
        buckets.add(piece)
        sums = _sums(piece)
        total += sums[0]
        squares += sums[1]
        absmax = max(absmax, sums[2])
    levels, counts = buckets.levels()
    if values.size < EXACT_BELOW and buckets.unlike > _TOO_COARSE * float(counts.sum()) ** 2:
        return _count_sorted(values)
    zeros = values.size - buckets.nonfinite - int(counts.sum())
    return Histogram(levels, counts, zeros, buckets.nonfinite, total, squares, absmax)


def _sums(piece: Array) -> tuple[float, float, float]:
    """Sum, sum of squares and largest magnitude of the finite values."""
    compiled, form = loops(), FORMATS[piece.dtype.itemsize]
    if compiled is not None and len(piece):
        total, squares, largest = compiled.sums(piece, piece.view(form.unsigned), form.magnitude)
        absmax = float(form.unsigned(largest).view(form.floating))
    else:
        wide = piece.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            total, squares = float(wide.sum()), _dot(wide, wide)
        absmax = float(np.abs(wide).max(initial=0))
    if isfinite(absmax):
        return total, squares, absmax
    return _sums(piece[np.isfinite(piece)])


def _dot(one: Floats, other: Floats) -> float:
    """Not ``@``, for which BLAS brings threads of its own."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.einsum("i,i->", one, other))


def _log_bins_of(values: Array) -> NDArray[np.int64]:
    found = np.zeros(len(LOG_EDGES) - 1, np.int64)
    for piece in pieces(values):
        magnitudes = np.abs(piece)
        found += log_bins(magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)])
    return found
