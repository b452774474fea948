"""GGUF, the files of llama.cpp: their matrices are mostly quantized, and read as what they stand for."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dynscope.checkpoints.checkpoint import Tensor
from dynscope.checkpoints.place import Place
from dynscope.checkpoints.safetensors_file import refuse_other_content
from dynscope.errors import InputError

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
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
        shape, data = _shape(one), one.data
        if self.place.is_remote:  # of which only the header is here
            start = int(one.data_offset)
            raw = self.place.read(start, start + int(one.n_bytes))
            data = raw.view(data.dtype).reshape(data.shape)
        try:
            if one.tensor_type.name in ("F32", "F16", "F64"):
                return np.asarray(data).reshape(shape)
            return np.asarray(dequantize(data, one.tensor_type)).reshape(shape)
        except Exception as error:
            raise InputError(
                f"{self.place}: {name} is stored as {one.tensor_type.name}, which could not be read "
                f"({str(error)[:120]})"
            ) from None

    def close(self) -> None:
        """Let go of the file, which is kept open because reading its vocabulary takes a second."""
        _opened.cache_clear()


def _reader(place: Place) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InputError(
            f"{place}: a GGUF file needs gguf, which is not installed: pip install gguf"
        ) from None
    start = place.read(0, min(64, place.size)).tobytes()
    refuse_other_content(place, start)
    if start[:4] != b"GGUF":
        raise InputError(f"{place}: does not begin as a GGUF file does; fetch it again")
    try:
        path = _header_of(place) if place.is_remote else place.local()
        return _opened(GGUFReader, path, path.stat().st_mtime_ns)
    except InputError:
        raise
    except Exception as error:  # a damaged file can end in any exception
        raise _bad(place, error) from None


def _header_of(place: Place) -> Path:
    """A file on this machine as long as the remote one, with nothing of it but its header."""
    target = place.copy.with_suffix(".header")
    if not target.exists():
        try:
            with place.open() as remote:
                length = header_length(remote)
        except ValueError:
            return place.local()  # of the first version, or damaged: gguf says what is wrong
        part = target.with_suffix(".part")
        with part.open("wb") as file:
            file.write(place.read(0, length).tobytes())
            file.truncate(place.size)
        part.replace(target)
    return target


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _LIST = 8, 9
_LARGEST_HEADER = 1 << 30


def header_length(file: BinaryIO) -> int:
    """How many bytes come before the tensors' own.

    Raises ValueError where it is no header of GGUF (versions 2 and 3, little-endian).
    """

    def number(size: int) -> int:
        raw = file.read(size)
        if len(raw) != size:
            raise ValueError("its header is cut off")
        return int.from_bytes(raw, "little")

    def skip(size: int) -> None:
        if file.tell() + size > _LARGEST_HEADER:
            raise ValueError("its header claims more than a gigabyte")
        file.seek(size, 1)

    def skip_value(kind: int, depth: int = 0) -> None:
        if kind == _STRING:
            skip(number(8))
        elif kind == _LIST and depth < 8:
            inner, count = number(4), number(8)
            if inner in _SIZES:
                skip(count * _SIZES[inner])
            else:
                for _ in range(count):
                    skip_value(inner, depth + 1)
        elif kind in _SIZES:
            skip(_SIZES[kind])
        else:
            raise ValueError(f"its header has a value of type {kind}")

    if file.read(4) != b"GGUF" or number(4) not in (2, 3):
        raise ValueError("it is not of version 2 or 3")
    tensors, fields = number(8), number(8)
    for _ in range(fields):
        skip(number(8))
        skip_value(number(4))
    for _ in range(tensors):
        skip(number(8))
        skip(8 * number(4) + 4 + 8)
    return file.tell()


@lru_cache(maxsize=1)
def _opened(reader: Callable[[Path], Any], path: Path, changed: int) -> Any:
    return reader(path)


def _bad(place: Place, error: Exception) -> InputError:
    first = (str(error) or type(error).__name__).splitlines()[0][:160]
    return InputError(f"{place}: is no sound GGUF file ({first}); fetch it again")


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
