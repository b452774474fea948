"""What a checkpoint is to those who read it: named tensors, a step and a configuration."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from numpy.typing import NDArray

from dynscope.errors import InputError


@dataclass(frozen=True)
class Tensor:
    """A tensor by its name in the model; ``nbytes`` is what it takes in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class File(Protocol):
    """One file of tensors, or one folder that is read like a file. It can be pickled."""

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def unreadable(self) -> tuple[tuple[str, str], ...]: ...

    def read(self, name: str) -> NDArray[Any]: ...

    def only(self, names: Collection[str]) -> "File":
        """The same for these tensors alone, where that makes it smaller to send."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one moment of a training, in one file or several.

    ``step`` is None where nothing names it. ``format`` is "safetensors", "torch", "torch distributed"
    or "gguf"; ``config`` the Hugging Face configuration or the GGUF metadata, ``quantized`` how
    matrices are stored ("Q4_K") where that is not as floats. ``unreadable`` are names and reasons.
    """

    path: str
    step: int | None
    format: str
    tensors: tuple[Tensor, ...]
    config: Mapping[str, Any] | None = None
    quantized: str = ""
    unreadable: tuple[tuple[str, str], ...] = ()
    files: Mapping[str, File] = field(default_factory=dict, repr=False, compare=False)

    def read(self, name: str) -> NDArray[Any]:
        """A tensor as a numpy array, of an `ml_dtypes` type where numpy has none.

        Raises `InputError` in one line where its bytes cannot be had.
        """
        if name not in self.files:
            raise InputError(f"{self.path}: holds no tensor {name!r}")
        return self.files[name].read(name)

    def only(self, names: Collection[str]) -> "Checkpoint":
        """The same with these tensors only, and without its configuration: small to send."""
        within: dict[int, list[str]] = {}
        for name in names:
            within.setdefault(id(self.files[name]), []).append(name)
        files = {key: self.files[own[0]].only(own) for key, own in within.items()}
        return replace(
            self,
            tensors=tuple(self._named[name] for name in names),
            files={name: files[key] for key, own in within.items() for name in own},
            config=None,
            unreadable=(),
        )

    def close(self) -> None:
        """Let go of open files; what is read later opens them again."""
        for one in {id(file): file for file in self.files.values()}.values():
            one.close()

    @cached_property
    def _named(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}
