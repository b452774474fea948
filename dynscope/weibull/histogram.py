"""How often each magnitude occurs among some weights: all that any of the fits needs.

16-bit and 8-bit floats have so few magnitudes that they are counted as they are. Of wider floats
fewer than `EXACT_BELOW` are sorted; more are counted by their own bits, rounded to 256 magnitudes
per octave: no logarithm, no window to choose, and the same at every scale. The loops over large
tensors are compiled where numba is installed (`dynscope.weibull.compiled`).
"""

import importlib
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from types import ModuleType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dynscope.errors import InputError
from dynscope.weibull.reasons import FINE, QUANTISED

Array = NDArray[Any]
Floats = NDArray[np.float64]

EXACT_BELOW = 1_000_000
"""Fewer values than this keep every magnitude."""

_KEPT_BITS = 8  # of the mantissa behind the leading one
_MOST_LEVELS = (
    2**17
)  # distinct magnitudes of a histogram that is rounded, or of 16-bit floats, and more
_CHUNK = 2**16  # elements worked on at a time: they stay in the cache
_MAGIC = b"dynscope histogram 1\n"


@dataclass(frozen=True)
class Histogram:
    """Finite magnitudes and how often each occurs, with sums over the signed values.

    ``levels`` (m,) are the distinct finite magnitudes, ascending, without zero; ``counts`` (m,)
    their numbers. ``sum``, ``sum_squares`` and ``absmax`` are over the finite values as they were,
    before any rounding. ``log_bins`` (1024,) are the magnitudes counted as the binned protocol does,
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

    @property
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
            levels, counts = _rounded(levels, counts)
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


def count(values: Array, binned: bool = False) -> Histogram:
    """Count the magnitudes of an array of any shape and memory order, also a memory-mapped one.

    float16, float32, float64, and bfloat16 and the 8-bit floats of ``ml_dtypes``. Integers, bool and
    complex numbers are never taken for weights: their histogram is empty and has a ``reason``. It is
    worked through in pieces: beside the array itself a few megabytes are needed. ``binned`` also fills
    ``log_bins``.
    """
    values = np.asanyarray(values)
    if not _is_float(values.dtype):
        nothing = np.empty(0), np.empty(0, np.int64)
        return Histogram(*nothing, reason=QUANTISED)
    if values.dtype.itemsize <= 2:
        found = _count_narrow(values)
    elif values.size < EXACT_BELOW:
        found = _count_sorted(values)
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


def _sorted_levels(values: Array) -> tuple[Array, NDArray[np.int64]]:
    """Distinct magnitudes, ascending, and how often each occurs; NaN and infinity at the end."""
    magnitudes = np.abs(values.reshape(-1))
    magnitudes.sort()
    tied = magnitudes[1:] == magnitudes[:-1]
    if not tied.any():
        return magnitudes, np.ones(len(magnitudes), np.int64)
    starts = np.flatnonzero(np.concatenate([[True], ~tied]))
    return magnitudes[starts], np.diff(starts, append=len(magnitudes))


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype in (np.float16, np.float32, np.float64) or _is_narrow(dtype)


def _is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether it is a 16-bit or 8-bit float of ml_dtypes."""
    return dtype.name == "bfloat16" or dtype.name.startswith("float8")


def _count_sorted(values: Array) -> Histogram:
    levels, counts = _sorted_levels(values)
    end = int(np.searchsorted(levels, levels.dtype.type(inf)))
    zeros = int(counts[0]) if end and levels[0] == 0 else 0
    start = int(zeros > 0)
    return Histogram(
        levels[start:end].astype(np.float64),
        counts[start:end],
        zeros,
        int(counts[end:].sum()),
        *_sums(values),
    )


def _count_narrow(values: Array) -> Histogram:
    """Every pattern is counted, its sign included, so that the sums follow exactly."""
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    counts = _patterns(values.view(unsigned), 2 ** (8 * values.dtype.itemsize))
    meaning = _meaning(values.dtype)
    finite = np.isfinite(meaning)
    seen = np.flatnonzero((counts > 0) & finite)
    level, place = np.unique(np.abs(meaning[seen]), return_inverse=True)
    each = np.bincount(place, weights=counts[seen], minlength=len(level)).astype(np.int64)
    zeros = int(each[0]) if len(level) and level[0] == 0 else 0
    start = int(zeros > 0)
    return Histogram(
        level[start:],
        each[start:],
        zeros,
        int(counts[~finite].sum()),
        _dot(meaning[seen], counts[seen].astype(np.float64)),
        _dot(meaning[seen] ** 2, counts[seen].astype(np.float64)),
        float(level[-1]) if len(level) else 0.0,
    )


def _patterns(values: Array, patterns: int) -> NDArray[np.int64]:
    compiled = _compiled(values.size)
    if compiled is not None:
        rows = np.zeros((4, patterns), np.int64)
        for piece in _pieces(values):
            compiled.count_patterns(piece, rows)
        counts: NDArray[np.int64] = rows.sum(0)
        return counts
    counts = np.zeros(patterns, np.int64)
    for chunk in _chunks(values, np.intp):
        counts += np.bincount(chunk, minlength=patterns)
    return counts


def _compiled(size: int) -> ModuleType | None:
    """The compiled loops where numba is installed and there is enough to do for them."""
    return _loops() if size >= EXACT_BELOW else None


@cache
def _loops() -> ModuleType | None:
    try:
        return importlib.import_module("dynscope.weibull.compiled")
    except Exception:  # numba is not there, or has no place to keep what it compiles
        return None


@cache
def _meaning(dtype: np.dtype[Any]) -> Floats:
    """The value of every bit pattern of a narrow float."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    patterns = np.arange(2 ** (8 * dtype.itemsize)).astype(unsigned)
    with np.errstate(invalid="ignore"):
        return patterns.view(dtype).astype(np.float64)


def _count_wide(values: Array) -> Histogram:
    """Bit patterns of magnitudes, rounded to the nearest of `_KEPT_BITS` bits behind the leading one."""
    kind = _WIDE[values.dtype.itemsize]
    shift = kind.mantissa - _KEPT_BITS
    counts, sums = _rounded_patterns(values, kind, shift)
    infinity = kind.infinity >> shift
    seen = np.flatnonzero(counts[:infinity])
    levels = (seen.astype(kind.unsigned) << kind.unsigned(shift)).view(kind.floating)
    start = int(len(seen) > 0 and seen[0] == 0)
    return Histogram(
        levels[start:].astype(np.float64),
        counts[seen[start:]],
        int(counts[0]) if start else 0,
        int(counts[infinity:].sum()),
        *sums,
    )


def _rounded_patterns(
    values: Array, kind: "_Wide", shift: int
) -> tuple[NDArray[np.int64], tuple[float, float, float]]:
    unsigned = kind.unsigned
    bits, half = values.view(unsigned), unsigned(1 << (shift - 1))
    magnitude, infinity = unsigned(kind.magnitude), unsigned(kind.infinity)
    counts = np.zeros((kind.infinity >> shift) + 1, np.int64)
    compiled = _compiled(values.size)
    if compiled is not None:
        sums = np.zeros(3)
        for piece in _pieces(bits):
            compiled.count_rounded(
                piece, piece.view(kind.floating), magnitude, infinity, half, unsigned(shift),
                counts, sums,
            )  # fmt: skip
        return counts, (float(sums[0]), float(sums[1]), float(sums[2]))
    for chunk in _chunks(bits, unsigned):
        chunk &= magnitude
        np.minimum(chunk, infinity, out=chunk)
        chunk += half
        chunk >>= unsigned(shift)
        found = np.bincount(chunk.astype(np.intp))
        counts[: len(found)] += found
    return counts, _sums(values)


@dataclass(frozen=True)
class _Wide:
    unsigned: Any
    floating: Any
    mantissa: int
    infinity: int
    magnitude: int  # the bits without the sign's


_WIDE = {
    4: _Wide(np.uint32, np.float32, 23, 0x7F800000, 0x7FFFFFFF),
    8: _Wide(np.uint64, np.float64, 52, 0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF),
}


def _sums(values: Array) -> tuple[float, float, float]:
    """Sum, sum of squares and largest magnitude of the finite values."""
    total = squares = largest = 0.0
    for chunk in _chunks(values, np.float64):
        square = _dot(chunk, chunk)
        if not np.isfinite(square):
            chunk = chunk[np.isfinite(chunk)]
            square = _dot(chunk, chunk)
        if len(chunk):
            total += float(chunk.sum())
            squares += square
            largest = max(largest, float(chunk.max()), -float(chunk.min()))
    return total, squares, largest


def _dot(one: Floats, other: Floats) -> float:
    """Not ``@``, for which BLAS brings threads of its own."""
    with np.errstate(invalid="ignore"):
        return float(np.einsum("i,i->", one, other))


def _pieces(values: Array) -> Iterator[Array]:
    """The elements in flat pieces, in the order of memory: views where that can be."""
    if values.size:
        pieces = np.nditer(
            values, flags=["external_loop", "buffered"], op_flags=["readonly", "aligned"],
            order="K", buffersize=_CHUNK,
        )  # fmt: skip
        for piece in pieces:
            yield cast(Array, piece)


def _chunks(values: Array, dtype: Any) -> Iterator[Array]:
    """The elements in flat pieces that may be written to, as ``dtype``."""
    room = np.empty(_CHUNK, dtype)
    for piece in _pieces(values):
        for start in range(0, len(piece), _CHUNK):
            part = piece[start : start + _CHUNK]
            chunk = room[: len(part)]
            chunk[...] = part
            yield chunk


def _log_bins_of(values: Array) -> NDArray[np.int64]:
    found = np.zeros(len(LOG_EDGES) - 1, np.int64)
    for chunk in _chunks(values, np.float64):
        magnitudes = np.abs(chunk)
        found += log_bins(magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)])
    return found


def _rounded(levels: Floats, counts: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
    """Levels at the nearest of `_KEPT_BITS` bits behind the leading one."""
    shift = np.uint64(52 - _KEPT_BITS)
    half = np.uint64(1 << (51 - _KEPT_BITS))
    patterns = ((levels.view(np.uint64) + half) >> shift) << shift
    found, place = np.unique(patterns, return_inverse=True)
    return found.view(np.float64), np.bincount(place, weights=counts).astype(np.int64)
