"""Files of `torch.save`: the model's tensors among whatever was saved, without running its code."""

import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynscope.checkpoints.checkpoint import Tensor
from dynscope.checkpoints.place import Place
from dynscope.checkpoints.safetensors_file import dtype_of, refuse_other_content
from dynscope.errors import InputError, first_line

_MODELS = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "net",
    "network",
    "weights",
    "params",
)
_OTHERS = re.compile(r"optim|sched|scaler|rng|ema_optim|callbacks|loops|random", re.IGNORECASE)
_STEPS = ("global_step", "step", "iteration", "iter", "iter_num", "steps", "num_updates")
ARCHIVE = b"PK\x03\x04"
"""How a file of torch.save begins since torch 1.6."""

_RUNS_CODE = "wants to run code"
_NEVER = re.compile(
    r"^(os|posix|nt|pty|sys|builtins|subprocess|shutil|socket|runpy|importlib)\b|^\w+$"
)
_EXPANDED = 1 << 26  # bytes that a tensor may take which stands for fewer stored ones
_LARGEST_PICKLE = 1 << 30
_LARGEST_LEGACY = 8 << 30


@dataclass
class TorchFile:
    """A file that `torch.load` opens with ``weights_only=True``.

    ``allow`` names classes that a user trusts, ``argparse.Namespace``. ``step`` is what the file
    itself says, if anything.
    """

    place: Place
    allow: tuple[str, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    step: int | None = None
    _loaded: dict[str, Any] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def open(cls, place: Place, allow: tuple[str, ...] = ()) -> "TorchFile":
        """Raises `InputError` for what needs code of its own to be opened, and for damaged files."""
        found = cls(place, allow)
        everything = _load(place, allow)
        model = _model(everything)
        if not model:
            raise InputError(f"{place}: holds no tensors under names; nothing to measure")
        found._loaded = model
        found.step = _step(everything)
        found.tensors, found.unreadable = _describe(model)
        return found

    def read(self, name: str) -> NDArray[Any]:
        if self._loaded is None:
            self._loaded = _model(_load(self.place, self.allow))
        try:
            return as_array(with_values(self._loaded[name], self.place.read))
        except InputError:
            raise
        except Exception as error:  # a damaged file can end in any exception
            told = first_line(error)
            raise InputError(f"{self.place}: {name} could not be read ({told})") from None

    def only(self, names: Collection[str]) -> "TorchFile":
        """Itself: all tensors share what was loaded."""
        return self

    def close(self) -> None:
        self._loaded = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None}


def as_array(tensor: Any) -> NDArray[Any]:
    """A torch tensor as a numpy array over the same memory, or a copy where it is not contiguous."""
    import torch

    plain = tensor.detach().contiguous()
    name = str(plain.dtype).removeprefix("torch.")
    if name.startswith(("bfloat", "float8")):
        bits = plain.view(torch.int16 if plain.itemsize == 2 else torch.uint8).numpy()
        return np.asarray(bits.view(dtype_of(name)))
    return np.asarray(plain.numpy())


def why_unreadable(tensor: Any) -> str:
    """Why a torch tensor's numbers cannot be had, or "" where they can."""
    import torch

    if tensor.layout != torch.strided:
        return "sparse or packed layout"
    nbytes = tensor.numel() * tensor.itemsize
    if 0 in tensor.stride() and nbytes > max(_EXPANDED, tensor.untyped_storage().nbytes()):
        return f"repeats what is stored to {nbytes:,} bytes"
    if tensor.is_quantized or tensor.is_complex():
        return "stored as integers, quantised or complex"
    return "no values (meta device)" if tensor.is_meta else ""


def _load(place: Place, allow: tuple[str, ...]) -> Any:
    """What was saved: its tensors without their values, or mapped from the file where that cannot be."""
    import torch

    if place.size == 0:
        raise InputError(f"{place}: is empty")
    start = place.read(0, min(64, place.size)).tobytes()
    refuse_other_content(place, start)
    archive = start.startswith(ARCHIVE)
    if not start.startswith((b"PK", b"\x80")):
        raise InputError(
            f"{place}: is no sound file of torch.save (it begins neither as a zip archive nor as a "
            "pickle); fetch or save it again"
        )
    if archive:
        _refuse_bomb(place)
    elif place.size > _LARGEST_LEGACY:
        raise InputError(
            f"{place}: is in torch's old format, which is read as a whole, and has {place.size:,} "
            "bytes: load and save it with a torch newer than 1.6"
        )
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if allow:
            trusted = [_named(name) for name in allow]
            stack.enter_context(torch.serialization.safe_globals(trusted))
        found = _load_outline(place) if archive else None
        if found is not None:
            return found
        path = place.local()
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
        except Exception as error:  # a damaged file can end in any exception
            raise _refusal(place, error) from None


def _load_outline(place: Place) -> Any:
    """What was saved, its tensors knowing only where in the file their values lie.

    None where torch cannot do that: before 2.7, or for a server without ranges. Raises `InputError`
    for what needs code of its own.
    """
    try:
        with place.open() as file:
            saved = outline(file)
    except Exception as error:
        refusal = _refusal(place, error)
        if _RUNS_CODE in str(refusal):
            raise refusal from None
        return None
    readable = [one for one in _model(saved).values() if not why_unreadable(one)]
    return None if any(_place_in_file(one) is None for one in readable) else saved


def outline(file: Any) -> Any:
    """What `torch.save` wrote, without the values of its tensors."""
    from torch import load
    from torch._subclasses.fake_tensor import FakeTensorMode

    with zipfile.ZipFile(file) as archive:
        orders = [name for name in archive.namelist() if name.endswith("/byteorder")]
        if any(archive.read(name) != sys.byteorder.encode() for name in orders):
            raise ValueError("its bytes are in the other order")
    file.seek(0)
    with FakeTensorMode():
        return load(file, map_location="cpu", weights_only=True)


def _place_in_file(tensor: Any) -> int | None:
    """The byte of its file at which the storage begins of a tensor that has no values here."""
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(tensor, FakeTensor):
        return None
    found: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return found


def with_values(tensor: Any, read: Callable[[int, int], NDArray[np.uint8]]) -> Any:
    """A tensor of `outline` with its values: ``read`` gives bytes of its file, from one to another."""
    import torch

    size, strides = tuple(tensor.shape), tensor.stride()
    start = _place_in_file(tensor)
    if start is None or not tensor.numel():
        return tensor if start is None else torch.empty(size, dtype=tensor.dtype)
    length = 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    first = start + tensor.storage_offset() * tensor.itemsize
    raw = read(first, first + length * tensor.itemsize)
    if raw.ctypes.data % tensor.itemsize or not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(tensor.dtype).as_strided(size, strides)


def _refusal(place: Place, error: Exception) -> InputError:
    wanted = re.search(
        r"GLOBAL ([\w.]+)|[Cc]an only build Tensor.*|Unsupported class ([\w.]+)", str(error)
    )
    name = next((one for one in wanted.groups() if one), "") if wanted else ""
    if name:
        trusted = f", or, if you trust that class, allow it by name: --allow {name}"
        return InputError(
            f"{place}: {_RUNS_CODE}, {name}, and was not opened: save the tensors alone (as "
            f"safetensors){trusted * (not _NEVER.search(name))}"
        )
    told = re.search(r"WeightsUnpickler error:\s*([^\n]+)", str(error))
    first = told.group(1)[:160] if told else first_line(error)
    return InputError(f"{place}: is no sound file of torch.save ({first}); fetch or save it again")


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        raise InputError(f"no class {name!r} can be imported, to be allowed", exit_code=2) from None


def _refuse_bomb(place: Place) -> None:
    """torch stores its records as they are: a file that would grow when unpacked is not torch's."""
    try:
        with place.open() as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{place}: is no sound zip archive ({error}); fetch it again") from None
    grown = sum(one.file_size for one in entries)
    pickled = max((one.file_size for one in entries if one.filename.endswith(".pkl")), default=0)
    packed = [one for one in entries if one.compress_type != zipfile.ZIP_STORED]
    if grown > place.size or (packed and pickled > 100 * place.size) or pickled > _LARGEST_PICKLE:
        raise InputError(
            f"{place}: would unpack to {grown:,} bytes from {place.size:,}: torch.save makes no such "
            "file, and it was not opened"
        )


# The model within


def _model(saved: Any) -> dict[str, Any]:
    """The tensors of the model, by name; each once where names share one."""
    tensors = _find(saved, 3)
    unique: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        key: tuple[Any, ...] = (name,)
        if not why_unreadable(tensor) and tensor.numel():
            start = _place_in_file(tensor)
            begin = tensor.data_ptr() if start is None else (start, tensor.storage_offset())
            key = (begin, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        unique.setdefault(key, name)
    return {name: tensors[name] for name in unique.values()}


def _find(saved: Any, levels: int) -> dict[str, Any]:
    """The mapping of names to tensors that is the model, whatever it is wrapped in.

    What has the name of a model comes before tensors beside it, a best loss or a random state. Several
    models, a generator and a discriminator, keep their names in front of their tensors'.
    """
    if not isinstance(saved, Mapping) or levels < 0:
        return {}
    own = dict(_tensors(saved))
    inner = {str(key): value for key, value in saved.items() if isinstance(value, Mapping)}
    for key in (one for one in _MODELS if one in inner):
        found = _find(inner[key], levels - 1)
        if found:
            return _without(found, "model.") if key == "state_dict" else found
    if _has_matrix(own):
        return own
    others = {
        key: _find(value, levels - 1)
        for key, value in inner.items()
        if not (key in _MODELS or _OTHERS.search(key) or "param_groups" in value)
    }
    several = {key: found for key, found in others.items() if _has_matrix(found)}
    if len(several) == 1:
        return next(iter(several.values()))
    named = ((key, found.items()) for key, found in several.items())
    return {f"{key}.{name}": one for key, items in named for name, one in items} or own


def _has_matrix(tensors: Mapping[str, Any]) -> bool:
    return any(one.ndim > 1 for one in tensors.values())


def _tensors(saved: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    import torch

    for name, value in saved.items():
        if isinstance(value, torch.Tensor) and isinstance(name, str):
            yield name, value


def _without(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Lightning puts the name of the attribute that holds the model in front of every name."""
    if all(name.startswith(prefix) for name in tensors):
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _describe(model: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], tuple[tuple[str, str], ...]]:
    tensors, unreadable = [], []
    for name, tensor in model.items():
        reason = why_unreadable(tensor)
        if reason:
            unreadable.append((name, reason))
        else:
            dtype = str(tensor.dtype).removeprefix("torch.")
            nbytes = tensor.numel() * tensor.itemsize
            tensors.append(Tensor(name, tuple(tensor.shape), dtype, nbytes))
    return tuple(tensors), tuple(unreadable)


def _step(saved: Any) -> int | None:
    if not isinstance(saved, Mapping):
        return None
    found = (saved.get(name) for name in _STEPS)
    return next((one for one in found if type(one) is int and one >= 0), None)
