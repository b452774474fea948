"""The growing file of a run: appended in HDF5's single-writer mode, compressed when it is closed."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynscope.runfile import storage
from dynscope.runfile.schema import GROWING, Header

if TYPE_CHECKING:
    import h5py

Record = Mapping[str, Any]
"""One row of an axis: dataset path to number, cell of text, or array of the other axes."""

RESERVE = 1024 * 1024  # bytes of free disk that are left to others


class LiveFile:
    """A run file that this process writes; ``sizes`` are the committed ones.

    It is filled with what ``source``, if any, has within ``sizes``, and put in place of ``path``
    only then. Nothing in it is created or changed later. ``tick`` is called during long work.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        created: str,
        sizes: dict[str, int],
        source: "h5py.File | None",
        tick: Callable[[], None],
    ) -> None:
        self.sizes = sizes
        self._path = path
        self._header = header
        self._created = created
        self._tick = tick
        self._arrays = storage.arrays_of(header)
        self.smallest_growth = RESERVE + storage.LIVE_CHUNK * len(self._arrays)
        self._file = self._replace(source, expected=sizes)

    def append(self, pending: Mapping[str, Sequence[Record]], overflow: bytes) -> None:
        """Write the records of each axis, then count them as committed."""
        sizes = {axis: n + len(pending[axis]) for axis, n in self.sizes.items()}
        sizes["overflow"] += len(overflow)
        if self._is_wider(sizes, pending):
            narrow = self._file
            self._file = self._replace(narrow, expected=sizes)
            narrow.close()
        for axis in GROWING:
            if sizes[axis] != self.sizes[axis]:
                self._file[axis].resize((sizes[axis],))
        self._file["overflow"][self.sizes["overflow"] :] = np.frombuffer(overflow, np.uint8)
        for axis in ("step", "weight_step"):
            self._file[axis][self.sizes[axis] :] = [record[axis] for record in pending[axis]]
        for array in self._arrays:
            self._append_rows(array, pending[array.axes[0]], sizes)
        self._file.flush()
        self._file["committed"][:] = [sizes[axis] for axis in GROWING]
        self._file.flush()
        self.sizes = sizes

    def _append_rows(
        self, array: storage.Array, records: Sequence[Record], sizes: Mapping[str, int]
    ) -> None:
        dataset = self._file[array.path]
        shape = tuple(storage.length(axis, sizes, self._header) for axis in array.axes)
        if dataset.shape != shape:
            dataset.resize(shape)
        cells = [(i, r[array.path]) for i, r in enumerate(records) if array.path in r]
        if not cells:
            return
        start = self.sizes[array.axes[0]]
        if len(shape) == 1:
            dataset[start:] = np.array([value for _, value in cells], dtype=array.dtype)
            return
        block = np.full((len(records), *shape[1:]), dataset.fillvalue, dtype=array.dtype)
        for i, value in cells:
            block[i, : len(value)] = value
        dataset[start:] = block

    def _is_wider(self, sizes: Mapping[str, int], pending: Mapping[str, Sequence[Record]]) -> bool:
        """Whether the first row of an axis comes with another width than the file is chunked for.

        Sites are known only at the first row, and chunks cannot be changed in a live file.
        """
        begins = any(not self.sizes[a] and pending[a] for a in ("step", "weight_step"))
        return begins and any(sizes[a] != self._expected[a] for a in ("site", "parameter"))

    def _replace(self, source: "h5py.File | None", *, expected: Mapping[str, int]) -> "h5py.File":
        """Put a live file with the content of ``source`` in place."""
        self._expected = dict(expected)
        new = beside(self._path)
        file = storage.create(new, self._header, self._created, self.sizes, expected=expected)
        if source is not None:
            storage.copy(source, file, self._header, self._tick)
        file.swmr_mode = True
        file.flush()
        new.replace(self._path)
        return file

    def close(self) -> None:
        """Put a compressed copy, marked as closed, in place.

        Where the disk has no room for a second copy the file stays as it is, uncompressed.
        """
        if self.free_space() > self._path.stat().st_size + RESERVE:
            self._compress()
            self._file.close()
        else:
            self._file.close()
            self._mark_closed()

    def _compress(self) -> None:
        new = beside(self._path)
        with storage.create(new, self._header, self._created, self.sizes) as closed:
            storage.copy(self._file, closed, self._header, self._tick)
        with new.open("rb") as stream:
            os.fsync(stream.fileno())
        new.replace(self._path)

    def _mark_closed(self) -> None:
        import h5py

        with h5py.File(self._path, "r+", locking=False) as file:
            file.attrs["closed"] = 1

    def free_space(self) -> float:
        """Bytes free where the run is written; unlimited where the file system does not say."""
        try:
            status = os.statvfs(self._path.parent)
        except OSError:
            return float("inf")
        return status.f_bavail * status.f_frsize if status.f_blocks else float("inf")


def beside(path: Path) -> Path:
    """Where a file is made before it is put in place of ``path``."""
    return path.with_name(path.name + ".tmp")
