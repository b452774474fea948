"""One checkpoint from a file or a folder: which files hold its tensors, and what describes them."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynscope.checkpoints.checkpoint import Checkpoint, File, Tensor
from dynscope.checkpoints.distributed import METADATA, Distributed
from dynscope.checkpoints.gguf_file import GgufFile
from dynscope.checkpoints.place import Place
from dynscope.checkpoints.safetensors_file import SafetensorsFile
from dynscope.checkpoints.torch_file import TorchFile
from dynscope.errors import InputError

TENSOR_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
NAMED = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin",
         "diffusion_pytorch_model.safetensors", "consolidated.safetensors")  # fmt: skip
_NOT_WEIGHTS = re.compile(
    r"^(optimizer|scheduler|scaler|training_args|rng_state\w*|random_states\w*|trainer_state"
    r"|.*_optim(izer)?_states)\.(pt|pth|bin|ckpt)$"
)
PART = re.compile(r"(.+?)-(\d{5})-of-(\d{5})(\.\w+)$")
_LARGEST_TEXT = 200_000_000


def is_tensor_file(name: str) -> bool:
    """Whether a file of this name may hold a model's weights."""
    return name.endswith(TENSOR_FILES) and not _NOT_WEIGHTS.match(name)


@dataclass
class _Parts:
    """What the files of one checkpoint hold together."""

    files: dict[str, File] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    quantized: list[str] = field(default_factory=list)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def add(self, file: File) -> None:
        """A name that several files hold is read from the first."""
        for one in file.tensors:
            if one.name not in self.files:
                self.files[one.name] = file
                self.tensors.append(one)
        self.unreadable |= dict(file.unreadable)
        if isinstance(file, TorchFile) and self.step is None:
            self.step = file.step
        if isinstance(file, GgufFile):
            self.metadata = {**file.metadata, **self.metadata}
            self.quantized += [file.quantized] if file.quantized else []


def opened(place: Place, names: list[str] | None, allow: tuple[str, ...]) -> Checkpoint:
    """The checkpoint at a file, or in a folder that holds ``names``. Its step is left open.

    Raises `InputError` where there is none, or nothing of it can be read.
    """
    if names is None:
        found = _of_files(place, [place.name], place.parent, allow)
        return _described(found, place, place.parent)
    if METADATA in names:
        parts = _Parts()
        parts.add(Distributed.open(place))
        return _described((parts, "torch distributed"), place, place)
    index = next((one for one in INDEXES if one in names), None)
    if index is not None:
        return _described(_of_index(place, index, allow), place, place)
    return _described(_of_files(place, weight_files(names), place, allow), place, place)


def weight_files(names: list[str]) -> list[str]:
    """The files of a folder that make up one checkpoint; none where it cannot be told which."""
    named = [one for one in NAMED if one in names]
    if named:
        return named[:1]
    files = [one for one in names if is_tensor_file(one)]
    safe = [one for one in files if one.endswith(".safetensors")]
    files = safe or files
    stems = {match.group(1, 3) for one in files if (match := PART.match(one))}
    whole = [one for one in files if not PART.match(one)]
    return files if len(stems) + len(whole) == 1 else []


def _of_files(
    place: Place, names: list[str], folder: Place, allow: tuple[str, ...]
) -> tuple[_Parts, str]:
    if names and (match := PART.match(names[0])):  # the shards that are missing are told
        names = [_part_name(match, number) for number in range(1, int(match.group(3)) + 1)]
    parts = _Parts()
    if not names:
        raise InputError(
            f"{place}: holds no checkpoint, or several that are not told apart by a step"
        )
    failed: list[InputError] = []
    for name in names:
        try:
            parts.add(
                _file(folder.child(name) if len(names) > 1 or folder == place else place, allow)
            )
        except InputError as error:
            failed.append(error)
            parts.unreadable[name] = str(error)
    if not parts.files:
        raise failed[0] if failed else InputError(f"{place}: holds no tensors")
    return parts, _format(names[0])


def _part_name(match: "re.Match[str]", number: int) -> str:
    stem, _, count, suffix = match.groups()
    return f"{stem}-{number:05d}-of-{count}{suffix}"


def _of_index(place: Place, index: str, allow: tuple[str, ...]) -> tuple[_Parts, str]:
    """The files that an index names; those of one that is missing or damaged are told by name."""
    content = _json(place.child(index))
    weights = content.get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(one, str) for one in weights.values()):
        raise InputError(f"{place.child(index)}: is no index of a checkpoint: it has no weight_map")
    parts = _Parts()
    failed: dict[str, str] = {}
    for name in dict.fromkeys(weights.values()):
        try:
            if "/" in name or "\\" in name:
                raise InputError(
                    f"{place.child(index)}: names {name[:80]!r}, outside of its folder"
                )
            parts.add(_file(place.child(name), allow))
        except InputError as error:
            failed[name] = str(error)
    if not parts.files:
        raise InputError(next(iter(failed.values()), f"{place}: the index names no file"))
    for tensor, name in weights.items():
        if tensor not in parts.files:
            parts.unreadable.setdefault(
                str(tensor), failed.get(name, f"{name} lacks it, though the index says otherwise")
            )
    return parts, _format(index.removesuffix(".index.json"))


def _file(place: Place, allow: tuple[str, ...]) -> File:
    openers: dict[str, Callable[[], File]] = {
        "safetensors": lambda: SafetensorsFile.open(place),
        "gguf": lambda: GgufFile.open(place),
        "torch": lambda: TorchFile.open(place, allow),
    }
    return openers[_format(place.name)]()


def _format(name: str) -> str:
    suffix = name.rpartition(".")[2]
    return suffix if suffix in ("safetensors", "gguf") else "torch"


def _described(found: tuple[_Parts, str], place: Place, folder: Place) -> Checkpoint:
    """With the configuration beside the files, where there is one."""
    parts, kind = found
    config = _beside(folder, "config.json") if kind != "gguf" else dict(parts.metadata)
    if isinstance(config.get("quantization_config"), dict):
        parts.quantized.append(str(config["quantization_config"].get("quant_method", "quantized")))
    step = parts.step
    if step is None:
        said = _beside(folder, "trainer_state.json").get("global_step")
        step = said if type(said) is int else None
    return Checkpoint(
        path=str(place),
        step=step,
        format=kind,
        tensors=tuple(parts.tensors),
        config=config or None,
        quantized=", ".join(dict.fromkeys(parts.quantized)),
        unreadable=tuple(parts.unreadable.items()),
        files=parts.files,
    )


def _beside(folder: Place, name: str) -> dict[str, Any]:
    place = folder.child(name)
    try:
        return _json(place) if place.is_file() else {}
    except InputError:
        return {}  # the weights can be measured without it


def _json(place: Place) -> dict[str, Any]:
    try:
        content = json.loads(place.text(_LARGEST_TEXT))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: is no JSON ({str(error)[:120]})") from None
    if not isinstance(content, dict):
        raise InputError(f"{place}: is no JSON object")
    return content
