"""The run file as HDF5: open one with clear errors, lay one out, copy what is committed.

Only this module, `dynscope.writing.writer` and `dynscope.reading.run` import h5py, and only inside functions, so
that a training process which hands its rows to the writer process never loads an HDF5 library.
HDF5's own file locks are never asked for: many network file systems have none (errno 37), and two
writers are kept apart by `dynscope.runfile.lock` instead, which works everywhere.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynscope.errors import InputError
from dynscope.runfile.lock import is_written
from dynscope.runfile.salvage import ShortFile, is_live, stated_length
from dynscope.runfile.schema import (
    COLUMNS,
    COORDINATES,
    FORMAT,
    FORMAT_VERSION,
    GROWING,
    TOP,
    Header,
    encode,
    metric_dtype,
    missing,
    to_json,
)

if TYPE_CHECKING:
    import h5py

LIVE_CHUNK = 64 * 1024  # rewritten whole at every flush, so small
CLOSED_CHUNK = 512 * 1024
BLOCK = 32 * 1024 * 1024  # bytes copied at a time
NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"  # how netCDF-4 marks these


@dataclass(frozen=True)
class Array:
    """One dataset of a run file before it exists."""

    path: str
    axes: tuple[str, ...]
    dtype: str
    attributes: Mapping[str, Any]


def arrays_of(header: Header) -> list[Array]:
    """All the datasets of a run but the dimension scales, in the order of the format."""
    columns = [Array(c.path, (c.axis,), c.dtype, {"meaning": c.meaning}) for c in COLUMNS]
    metrics = [
        Array(
            m.name, m.axes, metric_dtype(m.name),
            {key: getattr(m, key) for key in METRIC_ATTRIBUTES},
        )
        for m in header.metrics
        if "group" not in m.axes or header.optimizer_groups
    ]  # fmt: skip
    return columns + metrics


METRIC_ATTRIBUTES = ("unit", "definition", "reading", "source", "bundle")


@contextmanager
def reading(path: str | os.PathLike[str]) -> "Iterator[h5py.File]":
    """A run file for reading, be it closed, live or left behind by a killed writer.

    Raises `InputError` when it is not a run, or where it turns out to be damaged inside.
    """
    file = _open(Path(path))
    try:
        with damage_told(path):
            yield file
        check_whole(file)
    except InputError:
        check_whole(file)
        raise
    finally:
        file.close()


@contextmanager
def damage_told(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make an `InputError` of what HDF5, or text and JSON that make no sense, raise."""
    try:
        yield
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise InputError(f"{path}: damaged run file, {reason}") from error


def check_whole(file: "h5py.File") -> None:
    """Raise `InputError` if something was read from beyond the end of a shortened file."""
    short: ShortFile | None = getattr(file, "short", None)
    if short is not None and short.missed:
        raise InputError(f"{short.path}: truncated, its last part is missing")


def _open(path: Path) -> "h5py.File":
    head = _first_bytes(path)
    live = is_live(head)
    try:
        if live and not (is_written(path) and _is_whole(path)):
            file = _open_short(path)
        else:
            file = _open_whole(path, live)
        _check_format(path, file)
    except (OSError, RuntimeError, KeyError) as error:
        raise InputError(f"{path}: damaged or truncated, HDF5 says: {error}") from error
    return file


def _is_whole(path: Path) -> bool:
    """Whether a live file is as long as it says; a writer that just flushes it is waited for."""
    for _ in range(5):
        if path.stat().st_size >= stated_length(_first_bytes(path)):
            return True
        time.sleep(0.01)
    return False


def _open_short(path: Path) -> "h5py.File":
    """A live file that nobody writes, or that is too short; see `dynscope.runfile.salvage`."""
    import h5py

    short = ShortFile(path)
    file = h5py.File(short, "r")
    file.short = short
    return file


def _open_whole(path: Path, live: bool) -> "h5py.File":
    import h5py

    try:
        return h5py.File(path, "r", swmr=live, locking=False)
    except OSError:  # HDF5 wants the same setting as whoever has it open in this process
        return h5py.File(path, "r", swmr=live)


def _first_bytes(path: Path) -> bytes:
    """HDF5's superblock; names what the file is when it is not HDF5 at all."""
    try:
        with path.open("rb") as stream:
            head = stream.read(512)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory, not a run file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if head.startswith(b"\x89HDF\r\n\x1a\n") and len(head) >= 48:
        return head
    if not head:
        raise InputError(f"{path}: empty file, not a dynscope run")
    if head.startswith(b"version https://git-lfs"):
        raise InputError(f"{path}: a git-lfs pointer, not the run itself; fetch it by git lfs pull")
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise InputError(f"{path}: a web page, not a dynscope run; the download has failed")
    raise InputError(f"{path}: not an HDF5 file, so not a dynscope run")


def _check_format(path: Path, file: "h5py.File") -> None:
    name = file.attrs.get("format")
    check_whole(file)
    if name != FORMAT:
        raise InputError(f"{path}: an HDF5 file, but not a dynscope run (no format attribute)")
    version = int(file.attrs.get("format_version", 0))
    if version > FORMAT_VERSION:
        raise InputError(
            f"{path}: written in run format {version}, this dynscope reads up to "
            f"{FORMAT_VERSION}; upgrade it: pip install -U dynscope"
        )
    if "committed" not in file or file["committed"].shape != (len(GROWING),):
        raise InputError(f"{path}: damaged run file, /committed is missing")


def committed_sizes(file: "h5py.File") -> dict[str, int]:
    """Length of every growing axis that counts; rows beyond it are not data."""
    return dict(zip(GROWING, map(int, file["committed"][:]), strict=True))


def create(
    path: Path,
    header: Header,
    created: str,
    sizes: Mapping[str, int],
    *,
    expected: Mapping[str, int] | None = None,
) -> "h5py.File":
    """Lay out a run file of the given sizes, with nothing in it yet.

    A live file names the sizes it is ``expected`` to grow to: it is chunked for short appends of
    whole rows and not compressed, since HDF5 would compress a chunk again at each flush. Without
    ``expected`` the file is a closed one, compressed.
    """
    import h5py

    # v110 is the oldest format that lets others read while we write, and older libraries open it.
    file = h5py.File(path, "w", libver=("v110", "v110"), locking=False)
    closed = expected is None
    file.attrs.update(_root_attributes(header, created, closed))
    committed = file.create_dataset("committed", data=[sizes[a] for a in GROWING], dtype="i8")
    committed.make_scale("committed")
    for axis in (*GROWING, "top", *(["group"] if header.optimizer_groups else [])):
        _create_scale(file, axis, sizes, header.optimizer_groups)
    for array in arrays_of(header):
        shape = tuple(length(axis, sizes, header) for axis in array.axes)
        grown = tuple(length(axis, expected or sizes, header) for axis in array.axes)
        dataset = file.create_dataset(
            array.path, shape, array.dtype,
            maxshape=tuple(None if a in GROWING else n for a, n in zip(array.axes, shape, strict=True)),
            chunks=_chunks(grown, np.dtype(array.dtype).itemsize, closed),
            fillvalue=None if array.dtype.startswith("S") else missing(array.dtype),
            **(COMPRESSED if closed else {}),
        )  # fmt: skip
        dataset.attrs.update(array.attributes)
        for dimension, axis in zip(dataset.dims, array.axes, strict=True):
            dimension.attach_scale(file[axis])
    return file


COMPRESSED: dict[str, Any] = {"compression": "gzip", "compression_opts": 4, "shuffle": True}


def length(axis: str, sizes: Mapping[str, int], header: Header) -> int:
    return {"top": TOP, "group": header.optimizer_groups}.get(axis) or sizes[axis]


def _root_attributes(header: Header, created: str, closed: bool) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created": created,
        "name": encode(header.name).decode(),
        "versions": to_json(header.versions),
        "config": to_json(header.config),
        "settings": to_json(header.settings),
        "anatomy": encode(header.anatomy).decode(),
        "segments": to_json(header.segments),
        "world_size": header.world_size,
        "optimizer_groups": header.optimizer_groups,
        "metrics": to_json([m.name for m in header.metrics]),
        "closed": int(closed),
    }


def _create_scale(file: "h5py.File", axis: str, sizes: Mapping[str, int], groups: int) -> None:
    if axis in GROWING:
        dtype = {"step": "i8", "weight_step": "i8"}.get(axis, "u1")
        file.create_dataset(axis, (sizes[axis],), dtype, maxshape=(None,), chunks=(4096,))
    else:
        file.create_dataset(axis, data=np.arange(TOP if axis == "top" else groups), dtype="i8")
    name = axis if axis in COORDINATES else f"{NO_VARIABLE}.{sizes[axis]:10d}"
    file[axis].make_scale(name)


def _chunks(shape: tuple[int, ...], itemsize: int, closed: bool) -> tuple[int, ...]:
    """Whole rows up to some bytes; an axis still empty is expected to become 64 long."""
    trailing = tuple(n or 64 for n in shape[1:])
    target = CLOSED_CHUNK if closed else LIVE_CHUNK // (1 if trailing else 4)
    rows = max(1, target // (itemsize * int(np.prod(trailing, dtype=int))))
    return (min(rows, max(1, shape[0])) if closed else min(rows, 1024), *trailing)


def copy(
    source: "h5py.File", target: "h5py.File", header: Header, tick: Callable[[], None]
) -> None:
    """Fill every dataset that both files have, as far as the target reaches.

    ``tick`` is called after each block.
    """
    for path in (*COORDINATES - {"top", "group"}, *(array.path for array in arrays_of(header))):
        if path in source:
            _copy_dataset(source[path], target[path], tick)
    check_whole(source)


def _copy_dataset(source: "h5py.Dataset", target: "h5py.Dataset", tick: Callable[[], None]) -> None:
    shape = tuple(min(pair) for pair in zip(source.shape, target.shape, strict=True))
    row = source.dtype.itemsize * int(np.prod(shape[1:], dtype=int))
    step = max(1, BLOCK // max(1, row))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        where = (slice(start, stop), *(slice(n) for n in shape[1:]))
        target[where] = source[where]
        tick()
