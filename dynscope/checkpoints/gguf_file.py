"""GGUF, the files of llama.cpp: their matrices are mostly quantized, and read as what they stand for."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from dynscope.checkpoints.checkpoint import Tensor
from dynscope.checkpoints.place import Place
from dynscope.checkpoints.safetensors_file import refuse_other_content
from dynscope.errors import InputError, first_line

_MAGIC = b"GGUF"
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_AT_ONCE = 1 << 22  # bytes that are dequantized at a time
_LONGEST = 64  # elements of a metadata list that are kept; vocabularies are longer


@dataclass(frozen=True)
class GgufFile:
    """A file whose header the ``gguf`` package has read."""

    place: Place
    tensors: tuple[Tensor, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    quantized: str = ""
    unreadable: tuple[tuple[str, str], ...] = ()

    @classmethod
    def open(cls, place: Place) -> "GgufFile":
        """Raises `InputError` for a damaged file and where gguf is not installed."""
        reader = _reader(place)
        try:
            return cls(place, _tensors(reader, place), _metadata(reader), _quantized(reader))
        except InputError:
            raise
        except Exception as error:
            raise _bad(place, error) from None

    def read(self, name: str) -> NDArray[Any]:
        from gguf.quants import dequantize

        one = next(tensor for tensor in _reader(self.place).tensors if tensor.name == name)
        start, stored = int(one.data_offset), one.data
        raw = self.place.read(start, start + int(one.n_bytes))
        data = raw.view(stored.dtype).reshape(stored.shape)
        shape = _shape(one)
        try:
            if one.tensor_type.name in ("F32", "F16", "F64"):
                return np.asarray(data).reshape(shape)
            rows = data.reshape(-1, data.shape[-1])
            some = max(1, _AT_ONCE // rows.shape[-1])
            found = np.empty((len(rows), shape[-1]), np.float32)
            for i in range(0, len(rows), some):
                found[i : i + some] = dequantize(rows[i : i + some], one.tensor_type)
            return found.reshape(shape)
        except Exception as error:
            raise InputError(
                f"{self.place}: {name} is stored as {one.tensor_type.name}, which could not be read "
                f"({str(error)[:120]})"
            ) from None

    def only(self, names: Collection[str]) -> "GgufFile":
        return replace(self, tensors=(), metadata={})

    def close(self) -> None:
        """Let go of the file, which is kept open because reading its vocabulary takes a second."""
        _opened.cache_clear()


def _reader(place: Place) -> Any:
    return _opened(place, 0 if place.is_remote else place.local().stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _opened(place: Place, changed: int) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InputError(
            f"{place}: a GGUF file needs gguf, which is not installed: pip install gguf"
        ) from None
    start = place.read(0, min(64, place.size)).tobytes()
    refuse_other_content(place, start)
    if not start.startswith(_MAGIC):
        raise InputError(f"{place}: does not begin as a GGUF file does; fetch it again")
    try:
        with place.open() as file:
            length = header_length(file, place.size)
        return GGUFReader(_header_of(place, length) if place.is_remote else place.local())
    except InputError:
        raise
    except Exception as error:  # a damaged file can end in any exception
        raise _bad(place, error) from None


def _header_of(place: Place, length: int) -> Path:
    """A file on this machine as long as the remote one, with nothing of it but its header."""
    target = place.copy.with_suffix(".header")
    if not target.exists():
        part = target.with_suffix(".part")
        with part.open("wb") as file:
            file.write(place.read(0, length).tobytes())
            file.truncate(place.size)
        part.replace(target)
    return target


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _LIST = 8, 9
_MOST_VALUES = 1 << 24  # in the lists of a header: ten times the longest vocabulary


def header_length(file: BinaryIO, size: int) -> int:
    """How many bytes of a GGUF file of this size come before its tensors.

    Raises ValueError where that is no header of GGUF, or one that its reader would never be done with.
    """
    file.seek(len(_MAGIC))
    raw = file.read(4)
    order: Literal["little", "big"] = "little" if raw[:2] != bytes(2) else "big"
    values = 0

    def number(bytes_: int) -> int:
        raw = file.read(bytes_)
        if len(raw) != bytes_:
            raise ValueError("its header is cut off")
        return int.from_bytes(raw, order)

    def skip(bytes_: int) -> None:
        if file.tell() + bytes_ > size:
            raise ValueError("its header claims more than the file has")
        file.seek(bytes_, 1)

    def skip_value(kind: int, depth: int) -> None:
        nonlocal values
        if kind == _STRING:
            skip(number(8))
        elif kind == _LIST and depth < 8:
            inner, count = number(4), number(8)
            values += count
            if values > _MOST_VALUES:
                raise ValueError(f"its header claims lists of {values:,} values")
            for _ in range(0 if inner in _SIZES else count):
                skip_value(inner, depth + 1)
            skip(count * _SIZES.get(inner, 0))
        elif kind in _SIZES:
            skip(_SIZES[kind])
        else:
            raise ValueError(f"its header has a value of type {kind}")

    tensors, fields = number(8), number(8)
    for _ in range(fields):
        skip(number(8))
        skip_value(number(4), 0)
    for _ in range(tensors):
        skip(number(8))
        skip(8 * number(4) + 4 + 8)
    return file.tell()


def _bad(place: Place, error: Exception) -> InputError:
    return InputError(f"{place}: is no sound GGUF file ({first_line(error)}); fetch it again")


def _shape(one: Any) -> tuple[int, ...]:
    """GGUF counts dimensions from the innermost one."""
    return tuple(int(size) for size in reversed(one.shape))


def _tensors(reader: Any, place: Place) -> tuple[Tensor, ...]:
    found = {}
    for one in reader.tensors:
        if one.name in found:
            raise InputError(f"{place}: is no sound GGUF file ({one.name!r} is there twice)")
        kind = one.tensor_type.name
        found[one.name] = Tensor(one.name, _shape(one), _PLAIN.get(kind, kind), int(one.n_bytes))
    return tuple(found.values())


def _metadata(reader: Any) -> dict[str, Any]:
    """What it says of itself, without the vocabulary and the like."""
    found = {}
    for name, one in reader.fields.items():
        if len(one.data) <= _LONGEST and not name.startswith(("GGUF.", "tokenizer.")):
            found[name] = _plain(one.contents())
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def _quantized(reader: Any) -> str:
    """The types of the matrices that are not floats, the commonest first."""
    kinds = Counter(one.tensor_type.name for one in reader.tensors if len(one.shape) > 1)
    return ", ".join(kind for kind, _ in kinds.most_common() if kind not in _PLAIN)
