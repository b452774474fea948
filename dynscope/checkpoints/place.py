"""A file or folder of a checkpoint, on disk or behind a URL of fsspec."""

import errno
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import numpy as np
from numpy.typing import NDArray

from dynscope.errors import InputError, first_line

Bytes = NDArray[np.uint8]
T = TypeVar("T")

_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub",
    "http": "aiohttp", "https": "aiohttp", "az": "adlfs", "abfs": "adlfs",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A path or a URL; reading it, or looking into it, raises `InputError` in one line."""

    path: str

    def __post_init__(self) -> None:
        try:
            urlsplit(self.path if self.is_remote else "")
        except ValueError as error:
            raise InputError(f"{self.path}: is no URL ({error})") from None

    def __str__(self) -> str:
        """As it may be shown: without a password or a token of the URL."""
        if not self.is_remote:
            return self.path
        scheme, host, path, _, _ = urlsplit(self.path)
        return urlunsplit((scheme, host.rpartition("@")[2], path, "", ""))

    @property
    def is_remote(self) -> bool:
        return "://" in self.path

    @property
    def is_on_web(self) -> bool:
        """Whether a web server has it, which answers for a folder too, and need not list it."""
        return self.path.startswith(("http://", "https://"))

    @property
    def name(self) -> str:
        path = urlsplit(self.path).path if self.is_remote else os.path.abspath(self.path)
        return path.rstrip("/").rpartition("/")[2]

    def child(self, name: str) -> "Place":
        if not self.is_remote:
            return Place(os.path.join(self.path, name))
        scheme, host, path, query, _ = urlsplit(self.path)
        return Place(urlunsplit((scheme, host, f"{path.rstrip('/')}/{name}", query, "")))

    @property
    def parent(self) -> "Place":
        if not self.is_remote:
            return Place(os.path.dirname(os.path.abspath(self.path)))
        scheme, host, path, query, _ = urlsplit(self.path)
        return Place(urlunsplit((scheme, host, path.rstrip("/").rpartition("/")[0], query, "")))

    def is_file(self) -> bool:
        if not self.is_remote:
            return os.path.isfile(self.path)
        return bool(self._ask(lambda: self._files.isfile(self._key)))

    def is_folder(self) -> bool:
        if not self.is_remote:
            return os.path.isdir(self.path)
        return bool(self._ask(lambda: self._files.isdir(self._key)))

    def check_answer(self) -> None:
        """Raises `InputError` where a web server refuses, or is not there; not for what it lacks."""

        def ask() -> None:
            with suppress(FileNotFoundError):
                self._files.exists(self._key, strict=True)

        if self.is_on_web:
            self._ask(ask)

    def names(self) -> list[str]:
        """What lies in a folder, sorted; nothing where that cannot be listed."""
        if not self.is_remote:
            return sorted(_told(self, lambda: os.listdir(self.path)))
        found = self._ask(lambda: self._files.ls(self._key, detail=False))
        return sorted({str(one).rstrip("/").rpartition("/")[2] for one in found} - {""})

    @cached_property
    def size(self) -> int:
        if not self.is_remote:
            return _told(self, lambda: os.stat(self.path).st_size)
        return int(self._ask(lambda: self._files.size(self._key)) or 0)

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes ``start`` to ``stop``, which are fetched and nothing besides, into memory."""
        if stop > self.size:
            raise InputError(f"{self}: ends before byte {stop:,}: it is truncated; fetch it again")
        if start == stop:
            return np.empty(0, np.uint8)
        if self.is_remote and not self.copy.exists():
            raw = self._ask(lambda: self._files.cat_file(self._key, start=start, end=stop))
            if len(raw) == stop - start:
                return np.frombuffer(raw, np.uint8)
            if len(raw) != self.size:
                raise InputError(f"{self}: {len(raw):,} bytes came instead of {stop - start:,}")
            _kept(self.copy, raw)  # the server knows no ranges: it is asked once
        path = self.copy if self.is_remote else self.path
        found = _told(self, lambda: np.fromfile(path, np.uint8, count=stop - start, offset=start))
        if len(found) != stop - start:
            raise InputError(f"{self}: ends before byte {stop:,}: it is truncated; fetch it again")
        return found

    def open(self) -> BinaryIO:
        """To read and seek in; of a remote file what is read travels, by 64 KiB."""
        path = self.copy if self.is_remote else Path(self.path)
        if not self.is_remote or path.exists():
            return _told(self, lambda: open(path, "rb"))
        return cast(
            BinaryIO, self._ask(lambda: self._files.open(self._key, "rb", block_size=1 << 16))
        )

    def text(self, most: int) -> str:
        """All of it as text; raises `InputError` beyond ``most`` bytes or where it is none."""
        if self.size > most:
            raise InputError(f"{self}: has {self.size:,} bytes, too many for what it should be")
        try:
            return self.read(0, self.size).tobytes().decode()
        except UnicodeDecodeError:
            raise InputError(f"{self}: is not text in UTF-8") from None

    def local(self) -> Path:
        """Where it lies on this machine; a remote file is fetched into a folder that ends with us."""
        if not self.is_remote:
            return Path(self.path)
        target = self.copy
        if not target.exists():
            part = target.with_suffix(".part")
            self._ask(lambda: self._files.get_file(self._key, str(part)))
            part.replace(target)
        return target

    @property
    def copy(self) -> Path:
        """Where a copy of a remote file, or of a part of it, has its place on this machine."""
        return _fetched(self.path)

    @cached_property
    def _found(self) -> tuple[Any, str]:
        return _told(self, lambda: _file_system(self.path))

    @property
    def _files(self) -> Any:
        return self._found[0]

    @property
    def _key(self) -> str:
        return self._found[1]

    def _ask(self, question: Callable[[], T]) -> T:
        return _told(self, question)

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}  # connections stay in the process that made them

    def __setstate__(self, state: dict[str, str]) -> None:
        object.__setattr__(self, "path", state["path"])


def _file_system(url: str) -> tuple[Any, str]:
    scheme = urlsplit(url).scheme
    try:
        import fsspec
    except ImportError:
        raise InputError(
            f"{scheme}:// needs fsspec, which is not installed: pip install 'dynscope[remote]'"
        ) from None
    try:
        files, key = fsspec.core.url_to_fs(url)
    except ImportError:
        package = _PACKAGES.get(scheme, "its package for fsspec")
        raise InputError(
            f"{scheme}:// needs {package}, which is not installed: pip install {package}"
        ) from None
    except ValueError as error:
        raise InputError(f"{url}: {str(error).splitlines()[0]}") from None
    return files, str(key)


def _told(place: Place, question: Callable[[], T]) -> T:
    """The answer, or what went wrong in one line that names the place."""
    try:
        return question()
    except InputError:
        raise
    except FileNotFoundError as error:
        refused = error.__cause__  # fsspec says so of whatever a web server answers
        if refused is None or getattr(refused, "status", 0) == 404:
            raise InputError(f"{place}: no such file or folder") from None
        raise InputError(f"{place}: cannot be read ({_harmless(refused)})") from None
    except PermissionError as error:
        raise InputError(
            f"{place}: access is denied ({_harmless(error)}); check its rights or your credentials"
        ) from None
    except Exception as error:  # every file system has exceptions of its own
        if getattr(error, "errno", None) == errno.ENOENT:
            raise InputError(f"{place}: no such file or folder") from None
        raise InputError(f"{place}: cannot be read ({_harmless(error)})") from None


def _harmless(error: BaseException) -> str:
    # A signed URL in a message carries credentials.
    return re.sub(r"\?\S+|//[^/\s]*@", "", first_line(error, 200))


def _kept(target: Path, raw: bytes) -> None:
    part = target.with_suffix(".part")
    part.write_bytes(raw)
    part.replace(target)


@cache
def _downloads() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="dynscope-")


def _fetched(url: str) -> Path:
    import hashlib

    return Path(_downloads().name) / hashlib.sha256(url.encode()).hexdigest()[:32]
