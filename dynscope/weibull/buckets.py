"""Magnitudes of wide floats counted by their leading bits, with the mean of what fell into each bucket.

An octave has 4,096 buckets, so a bucket is 0.02 % wide, and since its mean is known, the line through
the buckets of a smooth distribution is the line through its values to nine digits. There is no
logarithm and no window to choose, and scaling by a power of two changes nothing.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

KEPT_BITS = 12  # of the mantissa behind the leading one
FEW = 16  # values in a bucket: their order does not matter
_OCTAVE = 1 << KEPT_BITS


@dataclass(frozen=True)
class Format:
    """A floating-point format. Behind a bucket's bits come ``rest`` more that its mean is taken from."""

    unsigned: Any
    floating: Any
    mantissa: int
    rest: int
    infinity: int

    @property
    def magnitude(self) -> Any:
        """The bits without the sign's."""
        return self.unsigned(self.infinity | ((1 << self.mantissa) - 1))

    @property
    def bias(self) -> int:
        """The exponent bits of 1."""
        return (self.infinity >> self.mantissa) // 2

    @property
    def shift(self) -> Any:
        """From a pattern to its bucket."""
        return self.unsigned(self.mantissa - KEPT_BITS)

    @property
    def fine(self) -> Any:
        """From a pattern to its bits that are used."""
        return self.unsigned(self.mantissa - KEPT_BITS - self.rest)

    @property
    def mask(self) -> Any:
        """The rest, of the bits that are used."""
        return self.unsigned((1 << self.rest) - 1)

    @property
    def one(self) -> Any:
        """A value that is counted, in a packed bucket."""
        return np.uint64(1 << self.sum_bits)

    @property
    def sum_bits(self) -> int:
        """A packed bucket holds the sum of its rests in these, and above them its count."""
        return 64 - (64 - self.rest) // 2

    @property
    def most(self) -> int:
        """As many values can be packed before one of the two might overflow."""
        return 1 << (64 - self.sum_bits)


FORMATS = {
    4: Format(np.uint32, np.float32, 23, 11, 0x7F800000),
    8: Format(np.uint64, np.float64, 52, 16, 0x7FF0000000000000),
}


class Buckets:
    """Counts of float32 or float64 values. ``loops`` is `dynscope.weibull.compiled`, or None for numpy."""

    def __init__(self, dtype: np.dtype[Any], loops: ModuleType | None) -> None:
        form = self._format = FORMATS[dtype.itemsize]
        self._bits = (form.magnitude, form.shift, form.fine, form.mask, form.one)
        self._loops = loops
        self._packed = np.zeros(0, np.uint64)
        self._first = 0  # the bucket of ``_packed[0]``
        self._room = form.most
        self._levels = np.empty(0)  # what the packed ones held before they were full
        self._counts = np.empty(0, np.int64)
        self.nonfinite = 0
        self.unlike = 0.0
        """After `levels`: the sum of the squared counts of buckets of more than `FEW` values that are unlike."""

    def add(self, piece: Array) -> None:
        """Count the values of a flat piece."""
        patterns = piece.view(self._format.unsigned)
        if len(patterns) > self._room:
            self._levels, self._counts = self.levels()
            self._packed[:], self._room = 0, self._format.most
        self._room -= len(patterns)
        while len(patterns):
            done = self._pack(patterns)
            patterns = self._reach(patterns[done:]) if done < len(patterns) else patterns[:0]

    def levels(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The mean magnitude of each bucket that is not empty, ascending, and how many fell into it."""
        levels, counts = self._unpack()
        if not len(self._counts):
            return levels, counts
        return merged(np.append(self._levels, levels), np.append(self._counts, counts))

    def _pack(self, patterns: Array) -> int:
        """Count until one has no bucket: how many were counted."""
        form = self._format
        if self._loops is not None:
            done: int = self._loops.pack(
                patterns, np.uint64(self._first), self._packed, *self._bits
            )
            return done
        used = (patterns & form.magnitude) >> form.fine
        if not used.all():
            used = used[used > 0]
        bucket = (used >> form.unsigned(form.rest)).astype(np.intp)
        bucket -= self._first
        if len(bucket) and (bucket.min() < 0 or bucket.max() >= len(self._packed)):
            return 0
        used &= form.mask
        np.add.at(self._packed, bucket, used + form.one)
        return len(patterns)

    def _reach(self, patterns: Array) -> Array:
        """Of these the finite ones, for which there are buckets now, in whole octaves."""
        form = self._format
        magnitudes = patterns & form.magnitude
        if magnitudes.max() >= form.infinity:
            finite = magnitudes < form.infinity
            self.nonfinite += len(patterns) - int(np.count_nonzero(finite))
            patterns, magnitudes = patterns[finite], magnitudes[finite]
        largest = magnitudes.max(initial=0)
        magnitudes -= form.unsigned(1)  # a zero becomes the largest
        smallest = int(magnitudes.min(initial=form.magnitude)) + 1
        if not largest:
            return patterns
        begin = (smallest >> int(form.shift)) // _OCTAVE * _OCTAVE
        end = ((int(largest) >> int(form.shift)) // _OCTAVE + 1) * _OCTAVE
        old, size = self._first, len(self._packed)
        if size:
            begin, end = min(begin, old), max(end, old + size)
        packed = np.zeros(end - begin, np.uint64)
        packed[old - begin : old - begin + size] = self._packed
        self._first, self._packed = begin, packed
        return patterns

    def _unpack(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        form = self._format
        if self._loops is not None:
            levels, counts, unlike = self._loops.unpack(
                self._packed.reshape(-1, _OCTAVE), form.most - self._room,
                self._first // _OCTAVE - form.bias, -form.bias, form.sum_bits, form.rest, FEW,
            )  # fmt: skip
            self.unlike += unlike
            return levels, counts
        seen = np.flatnonzero(self._packed != 0)
        packed = self._packed[seen]
        counts = packed >> np.uint64(form.sum_bits)
        rests = packed & np.uint64((1 << form.sum_bits) - 1)
        unlike = counts[(counts > FEW) & (rests % counts > 0)].astype(np.float64)
        self.unlike += float((unlike**2).sum())
        octave, place = np.divmod(seen + self._first, _OCTAVE)
        inside = (place + rests / (counts * 2.0**form.rest)) / _OCTAVE
        exponent = np.where(octave > 0, octave, 1) - form.bias
        return np.ldexp(inside + (octave > 0), exponent), counts.astype(np.int64)


def merged(
    levels: NDArray[np.float64], counts: NDArray[np.int64], bits: int = KEPT_BITS
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Levels other than zero, in any order, as one at their mean where their leading ``bits`` agree."""
    patterns = levels.view(np.uint64) >> np.uint64(FORMATS[8].mantissa - bits)
    bucket, place = np.unique(patterns, return_inverse=True)
    together = np.bincount(place, counts, len(bucket))
    return np.bincount(place, counts * levels, len(bucket)) / together, together.astype(np.int64)
