"""GGUF, the files of llama.cpp: their matrices are mostly quantized, and read as what they stand for."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

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
    """A file whose header the ``gguf`` package has read; a remote one is fetched whole."""

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
        shape = _shape(one)
        try:
            if one.tensor_type.name in ("F32", "F16", "F64"):
                return np.asarray(one.data).reshape(shape)
            return np.asarray(dequantize(one.data, one.tensor_type)).reshape(shape)
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
    path = place.local()
    try:
        return _opened(GGUFReader, path, path.stat().st_mtime_ns)
    except Exception as error:  # a damaged file can end in any exception
        raise _bad(place, error) from None


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
