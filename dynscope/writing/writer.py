"""Write a run file, row by row, so that whatever happens to the writer, what is in it can be read.

The file is in HDF5's single-writer mode: others read it while it grows, and after a kill every row
that `/committed` counts is whole. Rows are gathered for a second and appended together.
"""

import errno
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynscope.catalogue import Metric
from dynscope.errors import InputError
from dynscope.reading.run import Run
from dynscope.runfile import storage
from dynscope.runfile.lock import Lock
from dynscope.runfile.schema import (
    GROWING,
    TOP,
    Header,
    metric_dtype,
    missing,
    to_json,
)
from dynscope.site import Parameter, Site
from dynscope.writing.beginning import check_path, history
from dynscope.writing.cells import Cells
from dynscope.writing.live import LiveFile, beside

if TYPE_CHECKING:
    import h5py

Arrays = Mapping[str, np.ndarray[Any, Any]]
Derive = Callable[[dict[str, np.ndarray[Any, Any]]], dict[str, np.ndarray[Any, Any]]]

FLUSH_SECONDS = 1.0
FLUSH_BYTES = 32 * 1024 * 1024


class RunWriter:
    """The writer of one run file; it belongs to one thread.

    An existing path is refused unless ``overwrite`` (replaces a run or an empty file, nothing
    else) or ``resume`` (continues a closed or killed run with its next segment; begins a new one
    where there is no file). Raises `InputError` also where another process writes the path or
    where it cannot be written. ``sign`` is called every ten seconds of long work.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header,
        *,
        overwrite: bool = False,
        resume: bool = False,
        sign: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self.last_step = 0
        self.tokens_at: Callable[[int], int] = lambda step: -1  # of the run that is resumed
        self.segment = 0
        self._created = datetime.now(UTC).isoformat(timespec="seconds")
        self._header = header
        self._pending: dict[str, list[dict[str, Any]]] = {axis: [] for axis in GROWING}
        self._pending_bytes = 0
        self._cells = Cells()
        self._places: dict[str, dict[str, int]] = {"site": {}, "parameter": {}}
        self._order: dict[str, list[int]] = {"site": [], "parameter": []}
        self._flushed = time.monotonic()
        self._over = False
        self._told: set[str] = set()
        check_path(self.path, overwrite, resume)
        self._lock = Lock(self.path, sign)
        try:
            self._begin(resume)
        except BaseException:
            self.abandon()
            raise

    # What a run consists of

    def sites(self, sites: Sequence[Site], *, anew: bool = False) -> None:
        """Append columns for the sites; one whose path the run knows already keeps its column.

        Rows hold values in the order of all sites told so far, or with ``anew`` of these alone.
        """
        if anew:
            self._order["site"].clear()
        for site in sites:
            self._place("site", site.path, {
                "sites/path": site.path, "sites/role": site.role, "sites/stack": site.stack,
                "sites/depth": site.depth, "sites/type": site.type, "sites/dtype": site.dtype,
                "sites/aliases": to_json(list(site.aliases)),
            })  # fmt: skip

    def parameters(self, parameters: Sequence[Parameter], *, anew: bool = False) -> None:
        """Append columns for the parameters; as `sites`."""
        if anew:
            self._order["parameter"].clear()
        for p in parameters:
            self._place("parameter", p.name, {
                "parameters/name": p.name, "parameters/role": p.role, "parameters/stack": p.stack,
                "parameters/depth": p.depth, "parameters/shape": to_json(list(p.shape)),
                "parameters/numel": p.numel, "parameters/trainable": int(p.trainable),
                "parameters/group": p.group, "parameters/part_of": p.part_of,
            })  # fmt: skip

    def row(
        self,
        step: int,
        time: float,
        arrays: Arrays,
        *,
        via: str = "values",
        tokens: int = -1,
        cost: float = float("nan"),
    ) -> None:
        """Append one recorded step; ``via`` names what makes metrics of the arrays."""
        clock = {"step": step, "clock/time": time, "clock/tokens": tokens, "clock/cost": cost,
                 "clock/segment": self.segment}  # fmt: skip
        self._append("step", {**self._metrics("step", step, time, arrays, via), **clock})

    def weights(self, step: int, time: float, arrays: Arrays, *, via: str = "values") -> None:
        """Append one row of weight metrics, which have an axis of their own."""
        clock = {"weight_step": step, "clock/weight_time": time,
                 "clock/weight_segment": self.segment}  # fmt: skip
        metrics = self._metrics("weight_step", step, time, arrays, via)
        self._append("weight_step", {**metrics, **clock})

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._append("scalar", {"scalars/step": step, "scalars/time": time,
                                    "scalars/name": name, "scalars/value": value})  # fmt: skip

    def event(self, step: int, time: float, kind: str, message: str) -> None:
        self._append("event", {"events/step": step, "events/time": time,
                               "events/kind": kind, "events/message": message})  # fmt: skip

    def coverage(self, step: int, kind: str, path: str, metric: str, reason: str) -> None:
        """Say what was not recorded from ``step`` on, and why."""
        self._append("gap", {"coverage/step": step, "coverage/kind": kind, "coverage/path": path,
                             "coverage/metric": metric, "coverage/reason": reason})  # fmt: skip

    # From calls to rows

    def _place(self, axis: str, name: str, record: dict[str, Any]) -> None:
        places = self._places[axis]
        if name not in places:
            places[name] = len(places)
            self._append(axis, record)
        self._order[axis].append(places[name])

    def _metrics(
        self, axis: str, step: int, time: float, arrays: Arrays, via: str
    ) -> dict[str, np.ndarray[Any, Any]]:
        """The row's values by dataset; what cannot be derived is told in the file, never raised."""
        try:
            derived = _derivation(via)(dict(arrays))
        except Exception as error:
            self._tell(step, time, f"values of a row lost, {via} failed: {error!r}")
            return {}
        row = {}
        for name, metric in self._by_name.items():
            if name in derived and metric.axes[0] == axis:
                try:
                    row[name] = self._in_columns(metric, np.asarray(derived[name]))
                except (ValueError, TypeError) as error:
                    self._tell(step, time, f"{name} lost: {error}")
        return row

    def _tell(self, step: int, time: float, message: str) -> None:
        """An error as an event, once however often it comes."""
        if message not in self._told:
            self._told.add(message)
            self.event(step, time, "error", message)

    def _in_columns(self, metric: Metric, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Values in the order of this session's sites put into the columns of the file."""
        axis, dtype = metric.axes[1], metric_dtype(metric.name)
        groups = range(self._header.optimizer_groups)
        order = list(self._order.get(axis, groups))[: len(values)]
        if len(order) < len(values):
            raise ValueError(f"{len(values)} values for {len(order)} along {axis}")
        width = len(self._places.get(axis, groups))
        row = np.full((width, *([TOP] if "top" in metric.axes else [])), missing(dtype), dtype)
        with np.errstate(over="ignore"):  # beyond float32 is infinite in the file
            row[order] = values
        return row

    def _append(self, axis: str, record: dict[str, Any]) -> None:
        if self._over:
            return
        written = self._file.sizes["overflow"]
        cells = {path: self._cells.cell(path, v, written) for path, v in record.items()}
        self._pending[axis].append(cells)
        self._pending_bytes += sum(getattr(cell, "nbytes", 64) for cell in cells.values())
        if self._pending_bytes > FLUSH_BYTES:
            self.flush()
        else:
            self.flush_if_due()

    # From rows to the file

    def flush_if_due(self) -> None:
        """Write what is pending if the last time is a second ago."""
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending, then count it as committed.

        OSError when it cannot be written, after which the file is left alone.
        """
        self._flushed = time.monotonic()
        self._lock.touch()
        if self._over or not any(self._pending.values()):
            return
        try:
            self._check_space(self._pending_bytes)
            self._file.append(self._pending, self._cells.overflow)
        except Exception as error:
            self.abandon()
            raise OSError(f"{self.path}: writing failed, {error}") from error
        self._pending = {axis: [] for axis in GROWING}
        self._pending_bytes = 0
        self._cells.overflow = b""

    def _check_space(self, size: int) -> None:
        """Stop before the disk is full: HDF5 does not survive a write that fails."""
        if self._file.free_space() < 2 * size + self._file.smallest_growth:
            raise OSError(errno.ENOSPC, "no space left on the device", str(self.path))

    def close(self) -> None:
        """Write what is pending, compress the file and mark it as closed. May be called twice."""
        if self._over:
            return
        try:
            self.flush()
            self._lock.closing()
            self._file.close()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the path back and leave the file as it is; what is committed stays readable.

        The only thing to do after a failed write, since HDF5 does not survive another call.
        """
        self._over = True
        beside(self.path).unlink(missing_ok=True)
        self._lock.release()

    # Beginning and resuming

    def _begin(self, resume: bool) -> None:
        if resume and self.path.exists() and self.path.stat().st_size:
            with storage.reading(self.path) as source:
                sizes = storage.committed_sizes(source)
                self._continue(Run(self.path))
                self._create(sizes, source)
        else:
            self._create(dict.fromkeys(GROWING, 0), None)

    def _create(self, sizes: dict[str, int], source: "h5py.File | None") -> None:
        self._by_name = {metric.name: metric for metric in self._header.metrics}
        try:
            self._file = LiveFile(
                self.path, self._header, self._created, sizes, source, self._lock.touch
            )
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error})") from error

    def _continue(self, old: Run) -> None:
        """Take over what the run that is resumed knew."""
        self._created = old.metadata.created
        known = {metric.name: metric.axes for metric in self._header.metrics}
        for metric in old.metrics:
            if known.get(metric.name, metric.axes) != metric.axes:
                raise InputError(
                    f"{self.path}: {metric.name} has axes {metric.axes} in this run and "
                    f"{known[metric.name]} now; record to another path"
                )
        metrics = (*self._header.metrics, *(m for m in old.metrics if m.name not in known))
        groups = max(self._header.optimizer_groups, old.optimizer_groups)
        self._header = replace(
            self._header,
            metrics=metrics,
            optimizer_groups=groups,
            segments=history(old, self._header),
        )
        self._places["site"] = {site.path: i for i, site in enumerate(old.sites)}
        self._places["parameter"] = {p.name: i for i, p in enumerate(old.parameters)}
        self.last_step, self.tokens_at = old.last_step, old.tokens_at
        self.segment = old.segments


def _derivation(via: str) -> Derive:
    if via == "values":
        return dict
    module = {"tally": "dynscope.analysis.sums", "histograms": "dynscope.weibull"}[via]
    derive: Derive = importlib.import_module(module).derive
    return derive
