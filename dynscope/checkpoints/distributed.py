"""Checkpoints of torch.distributed: a folder with ``.metadata`` and the pieces of each process.

The metadata is a pickle. It is read by an unpickler that knows the classes of such metadata and
nothing else, so that no code runs; each piece is read with ``weights_only=True``.
"""

import io
import pickle
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynscope.checkpoints.checkpoint import Tensor
from dynscope.checkpoints.place import Place
from dynscope.checkpoints.safetensors_file import dtype_of
from dynscope.checkpoints.torch_file import ARCHIVE, as_array, outline, with_values
from dynscope.errors import InputError, first_line

METADATA = ".metadata"
_LARGEST_METADATA = 1 << 30
_OTHERS = re.compile(
    r"(?:^|\.)(?:optim\w*|lr_sched\w*|scheduler|rng\w*|dataloader)(?:\.|$)", re.IGNORECASE
)

_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset", "slice"},
}  # fmt: skip


@dataclass(frozen=True)
class _Piece:
    """Where a part of a tensor lies: in the tensor, and in which bytes of which file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Distributed:
    """A folder of `torch.distributed.checkpoint`. No process group is needed to read it.

    ``pieces`` are its tensors by name, each with the parts that make it up.
    """

    place: Place
    pieces: Mapping[str, tuple[Tensor, tuple[_Piece, ...]]]
    unreadable: tuple[tuple[str, str], ...] = ()

    @classmethod
    def open(cls, place: Place) -> "Distributed":
        """Raises `InputError` where the metadata is damaged or holds anything else than metadata."""
        metadata = _metadata(place.child(METADATA))
        pieces, unreadable = {}, []
        try:
            for name, one in metadata.state_dict_metadata.items():
                if _OTHERS.search(name) or not hasattr(one, "chunks"):
                    continue
                dtype = str(one.properties.dtype).removeprefix("torch.")
                shape = tuple(int(size) for size in one.size)
                found = [_piece(metadata, name, chunk) for chunk in one.chunks]
                itemsize = dtype_of(dtype).itemsize
                if not _make_up(found, shape):
                    unreadable.append((name, "its pieces do not make up the whole tensor"))
                    continue
                if any(piece.length < prod(piece.sizes) * itemsize for piece in found):
                    unreadable.append((name, "fewer bytes are stored than its shape takes"))
                    continue
                nbytes = prod(shape) * itemsize
                pieces[name] = (Tensor(name, shape, dtype, nbytes), tuple(found))
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise _bad(place, str(error) or type(error).__name__) from None
        prefix = _prefix([name for name, (one, _) in pieces.items() if one.shape])
        kept = {
            name.removeprefix(prefix): found
            for name, found in pieces.items()
            if name.startswith(prefix)
        }
        named = {name: (replace(one, name=name), parts) for name, (one, parts) in kept.items()}
        return cls(place, named, tuple(unreadable))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(one for one, _ in self.pieces.values())

    def read(self, name: str) -> NDArray[Any]:
        one, pieces = self.pieces[name]
        if len(pieces) == 1:
            return self._part(name, pieces[0], one)
        whole = np.empty(one.shape, dtype_of(one.dtype))
        for piece in pieces:
            where = (slice(a, a + n) for a, n in zip(piece.offsets, piece.sizes, strict=True))
            whole[tuple(where)] = self._part(name, piece, one)
        return whole

    def _part(self, name: str, piece: _Piece, one: Tensor) -> NDArray[Any]:
        import torch

        file = self.place.child(piece.file)
        raw = file.read(piece.start, piece.start + piece.length)
        try:
            if raw[: len(ARCHIVE)].tobytes() == ARCHIVE:
                tensor = with_values(outline(_Memory(raw)), lambda start, stop: raw[start:stop])
            else:
                old: Any = _Memory(raw)
                tensor = torch.load(old, weights_only=True, map_location="cpu")
            part = as_array(tensor)
        except Exception as error:
            raise _bad(file, f"the piece of {name}: {first_line(error, 120)}") from None
        if part.shape != piece.sizes or part.dtype != dtype_of(one.dtype):
            raise _bad(self.place, f"a piece of {name} is not what the metadata says")
        return part

    def only(self, names: Collection[str]) -> "Distributed":
        return replace(self, pieces={name: self.pieces[name] for name in names})

    def close(self) -> None:
        """Nothing stays open."""


def _bad(place: Place, what: str) -> InputError:
    return InputError(
        f"{place}: no sound torch.distributed checkpoint: {what[:160]}; save it again"
    )


class _Memory(io.RawIOBase):
    """Bytes of an array as a file, without a copy."""

    def __init__(self, raw: NDArray[np.uint8]) -> None:
        self._raw, self._at = raw, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._raw))[whence]
        return self._at

    def readinto(self, into: Any) -> int:
        found = self._raw[self._at : self._at + len(into)]
        memoryview(into).cast("B")[: len(found)] = found.data
        self._at += len(found)
        return len(found)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "pathlib" or module.startswith("pathlib."):
            return _joined  # a path of the machine that saved it; only its text is used
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which is no part of such metadata")


def _joined(*parts: str) -> str:
    return "/".join(parts)


def _metadata(place: Place) -> Any:
    if place.size > _LARGEST_METADATA:
        raise _bad(place, f"{place.size:,} bytes of metadata")
    raw = place.read(0, place.size).tobytes()
    try:
        found = _Unpickler(io.BytesIO(raw)).load()
    except ImportError:
        raise InputError(
            f"{place}: needs PyTorch to be read: pip install 'dynscope[torch]'"
        ) from None
    except Exception as error:  # a damaged pickle can end in any exception
        raise _bad(place, first_line(error)) from None
    if not isinstance(getattr(found, "state_dict_metadata", None), dict):
        raise _bad(place, "it describes no tensors")
    return found


def _piece(metadata: Any, name: str, chunk: Any) -> _Piece:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    offsets = tuple(int(one) for one in chunk.offsets)
    stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
    if re.search(r"(^|[/\\])\.\.([/\\]|$)|^[/\\]", stored.relative_path):
        raise ValueError(f"{stored.relative_path!r} leads out of the folder")
    if getattr(stored, "transform_descriptors", None):
        raise ValueError(f"{name} is stored compressed, by {stored.transform_descriptors}")
    sizes = tuple(int(one) for one in chunk.sizes)
    return _Piece(offsets, sizes, stored.relative_path, int(stored.offset), int(stored.length))


def _make_up(pieces: list[_Piece], shape: tuple[int, ...]) -> bool:
    """Whether pieces fill a tensor and no two lie over each other."""
    if sum(prod(one.sizes) for one in pieces) != prod(shape):
        return False
    start = np.array([one.offsets for one in pieces]).reshape(len(pieces), len(shape))
    stop = start + np.array([one.sizes for one in pieces]).reshape(start.shape)
    if (start < 0).any() or (stop > np.array(shape)).any():
        return False
    for i in range(len(pieces)):
        over = (start[i] < stop[i + 1 :]).all(1) & (start[i + 1 :] < stop[i]).all(1)
        if over.any():
            return False
    return True


def _prefix(names: list[str]) -> str:
    """The key under which the model was saved beside its optimizer and counters."""
    for prefix in ("model.", "state_dict.", "app.model.", "module."):
        if names and all(name.startswith(prefix) for name in names):
            return prefix
    return ""
