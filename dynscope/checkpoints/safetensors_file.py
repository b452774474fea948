"""Safetensors: 8 bytes of length, a header in JSON, then the tensors' bytes.

Format: https://github.com/huggingface/safetensors. The header is read here and not by that package,
because only so a tensor can be fetched from a bucket without the rest of its file.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynscope.checkpoints.checkpoint import Tensor
from dynscope.checkpoints.place import Place
from dynscope.errors import InputError

LARGEST_HEADER = 100_000_000  # bytes, as the format says
_LARGEST_SIZE = 2**48

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


@dataclass(frozen=True)
class SafetensorsFile:
    """A file whose header has been read and checked.

    ``places`` are its tensors by name, each with the byte of the file at which it begins.
    """

    place: Place
    places: Mapping[str, tuple[Tensor, int]]
    metadata: Mapping[str, str]
    unreadable: tuple[tuple[str, str], ...] = ()

    @classmethod
    def open(cls, place: Place) -> "SafetensorsFile":
        """Raises `InputError` for a file that is damaged, cut off or something else."""
        begin, header = _header(place)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise _bad(place, "its __metadata__ is no object")
        entries = {name: _entry(place, name, said) for name, said in header.items()}
        _check_places(place, entries, place.size - begin)
        known = {n: e for n, e in entries.items() if e.dtype in _DTYPES}
        odd = {n: e for n, e in entries.items() if n not in known}
        places = {}
        for name, one in known.items():
            _check_size(place, name, one)
            tensor = Tensor(name, one.shape, _DTYPES[one.dtype], one.end - one.start)
            places[name] = (tensor, begin + one.start)
        reasons = tuple((n, f"its dtype {e.dtype!r} is not read here") for n, e in odd.items())
        return cls(place, places, metadata, reasons)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(one for one, _ in self.places.values())

    def read(self, name: str) -> NDArray[Any]:
        one, start = self.places[name]
        raw = self.place.read(start, start + one.nbytes)
        return raw.view(dtype_of(one.dtype)).reshape(one.shape)

    def only(self, names: Collection[str]) -> "SafetensorsFile":
        return replace(self, places={name: self.places[name] for name in names}, metadata={})

    def close(self) -> None:
        """Nothing stays open."""


def dtype_of(name: str) -> np.dtype[Any]:
    """numpy's type of this name, or that of ml_dtypes."""
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(name)


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _bad(place: Place, what: str) -> InputError:
    return InputError(f"{place}: not a sound safetensors file: {what}; fetch or save it again")


def _header(place: Place) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and the header."""
    size = place.size
    if size < 8:
        raise _bad(place, f"it has {size} bytes")
    first = place.read(0, min(size, 64)).tobytes()
    refuse_other_content(place, first)
    length = int.from_bytes(first[:8], "little")
    if length > min(LARGEST_HEADER, size - 8):
        raise _bad(place, f"its header claims {length:,} bytes of a file of {size:,}")
    raw = place.read(8, 8 + length).tobytes()
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _bad(place, f"its header is no JSON ({str(error)[:120]})") from None
    if not isinstance(header, dict):
        raise _bad(place, "its header is no object")
    return 8 + length, header


def refuse_other_content(place: Place, first: bytes) -> None:
    """Raise `InputError` for a web page or a Git LFS pointer that was saved in a tensor file's place."""
    start = first.lstrip().lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise InputError(
            f"{place}: is a web page, not a checkpoint: the download was answered with a page, "
            "perhaps a login; fetch it again"
        )
    if start.startswith(b"version https://git-lfs"):
        raise InputError(
            f"{place}: is a Git LFS pointer, not the file itself: run git lfs pull in its repository"
        )


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:60]!r} is there twice")
        found[name] = value
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _entry(place: Place, name: str, said: Any) -> _Entry:
    told = name if len(name) <= 80 else f"{name[:80]}…"
    if not isinstance(said, dict) or not {"dtype", "shape", "data_offsets"} <= said.keys():
        raise _bad(place, f"{told!r} lacks dtype, shape or data_offsets")
    shape, offsets, dtype = said["shape"], said["data_offsets"], said["dtype"]
    if not isinstance(dtype, str) or not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
        raise _bad(place, f"{told!r} has a dtype, shape or data_offsets that cannot be")
    if len(shape) > 32 or prod(shape) > _LARGEST_SIZE:
        raise _bad(place, f"{told!r} has an impossible shape")
    return _Entry(dtype[:40], tuple(shape), *offsets)


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(one) is int and 0 <= one <= _LARGEST_SIZE for one in values
    )


def _check_size(place: Place, name: str, one: _Entry) -> None:
    needed = prod(one.shape) * dtype_of(_DTYPES[one.dtype]).itemsize
    if needed != one.end - one.start:
        raise _bad(
            place,
            f"{name[:80]!r} has {one.end - one.start:,} bytes where {one.dtype} "
            f"{list(one.shape)} takes {needed:,}",
        )


def _check_places(place: Place, entries: Mapping[str, _Entry], size: int) -> None:
    """Tensors lie one after the other and fill the file, as the format has it."""
    reached, before = 0, "the header"
    for name, one in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if one.start < reached or one.end < one.start:
            raise _bad(place, f"{name[:80]!r} overlaps {before[:80]!r}")
        if one.start > reached:
            raise _bad(place, f"a gap of {one.start - reached:,} bytes before {name[:80]!r}")
        reached, before = one.end, name
    if reached > size:
        raise InputError(
            f"{place}: is truncated: {size:,} of {reached:,} bytes of tensors are there; fetch it again"
        )
    if reached < size:
        raise _bad(place, f"{size - reached:,} bytes behind its last tensor")
