"""Read a run file: lazily, with labels, whether it was closed, is being written or was killed."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynscope.catalogue import METRICS, Metric
from dynscope.errors import InputError
from dynscope.runfile import storage
from dynscope.runfile.schema import COLUMNS, decode
from dynscope.site import Parameter, Site

if TYPE_CHECKING:
    import h5py
    import pandas as pd
    import xarray as xr

Ints = np.ndarray[Any, np.dtype[np.int64]]

_CLOCK = {c.path: c for c in COLUMNS if c.path.startswith("clock/")}


@dataclass(frozen=True)
class Metadata:
    """What a run says of itself; ``closed`` is False while it is written and after a kill.

    ``anatomy`` is the whole model as an indented tree: also the modules that were not recorded.
    ``segments`` says with what other ``config``, ``settings`` and ``versions`` a resumed run was
    recorded before, from ``segment`` ``until`` segment.
    """

    name: str
    created: str
    format_version: int
    versions: dict[str, str]
    config: dict[str, Any]
    settings: dict[str, Any]
    world_size: int
    closed: bool
    anatomy: str = ""
    segments: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Event:
    step: int
    time: float
    kind: str
    message: str


@dataclass(frozen=True)
class Gap:
    """Something that was not recorded from ``step`` on; an empty path or metric means all."""

    step: int
    kind: str
    path: str
    metric: str
    reason: str


class Run:
    """A recorded run, as it was when this object was made.

    ``run["activation/variance"]`` is a labelled array of ``(step, site)``, read when asked for.
    Where a step was recorded twice, because the run was resumed from an earlier checkpoint, the
    later row is shown; steps are in ascending order. Missing values are NaN, or -1 for integers.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open ``path``; raises `InputError` when it is not a run that can be read."""
        self.path = Path(path)
        with storage.reading(self.path) as file:
            self._sizes = storage.committed_sizes(file)
            attributes = dict(file.attrs)
            self._step, self._segment = self._axis(file, "step", "clock/segment")
            self._weight_step, segment = self._axis(file, "weight_step", "clock/weight_segment")
            self.metrics: tuple[Metric, ...] = _metrics(file, json.loads(attributes["metrics"]))
            self._overflow = file["overflow"][: self._sizes["overflow"]].tobytes()
            self.metadata = _metadata(attributes)
            self.optimizer_groups = int(attributes["optimizer_groups"])
        self.segments = 1 + max(
            (int(s.max()) for s in (self._segment, segment) if len(s)), default=-1
        )

    def _axis(self, file: "h5py.File", axis: str, segment: str) -> tuple[Ints, Ints]:
        return file[axis][: self._sizes[axis]], file[segment][: self._sizes[axis]]

    # Axes

    @cached_property
    def steps(self) -> Ints:
        """The recorded optimizer steps, 1-based, ascending, each once."""
        return np.unique(self._step)

    @cached_property
    def weight_steps(self) -> Ints:
        """The steps at which weights were measured."""
        return np.unique(self._weight_step)

    def tokens_at(self, step: int) -> int:
        """Tokens seen until ``step``, as the last row not after it says; -1 if none were told."""
        tokens = self["clock/tokens"].values[self.steps <= step]
        return int(tokens[-1]) if len(tokens) else -1

    @property
    def last_step(self) -> int:
        """The latest step of which anything is in the file, 0 when nothing is."""
        ends = (self._step, self._weight_step, self._columns("scalars")["step"])
        return max((int(steps[-1]) for steps in ends if len(steps)), default=0)

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        rows = _rows(self._columns("sites"))
        with storage.damage_told(self.path):
            return tuple(Site(**{**r, "aliases": tuple(json.loads(r["aliases"]))}) for r in rows)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        # Where depth is the order of calls it is known of sites only, at their first call.
        called = {site.path: site.depth for site in self.sites}

        def parameter(row: dict[str, Any]) -> Parameter:
            owner = row["name"].rpartition(".")[0]
            depth = called.get(owner, -1) if row["depth"] < 0 else row["depth"]
            shape, trainable = tuple(json.loads(row["shape"])), bool(row["trainable"])
            return Parameter(**{**row, "depth": depth, "shape": shape, "trainable": trainable})

        with storage.damage_told(self.path):
            return tuple(parameter(row) for row in _rows(self._columns("parameters")))

    # Tables

    @cached_property
    def events(self) -> tuple[Event, ...]:
        return tuple(Event(**r) for r in _rows(self._columns("events")))

    @cached_property
    def coverage(self) -> tuple[Gap, ...]:
        return tuple(Gap(**r) for r in _rows(self._columns("coverage")))

    @cached_property
    def _scalars(self) -> dict[str, Any]:
        return self._columns("scalars")

    @cached_property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars, in the order in which they first appeared."""
        return tuple(dict.fromkeys(self._scalars["name"]))

    def scalars(self, name: str) -> "xr.DataArray":
        """One scalar over the steps; the later value where a step repeats."""
        import xarray as xr

        if name not in self.scalar_names:
            known = ", ".join(self.scalar_names) or "none"
            raise InputError(f"{self.path}: no scalar {name!r}; it has: {known}")
        here = np.array([n == name for n in self._scalars["name"]])
        steps, order = _last_of_each(self._scalars["step"][here])
        return xr.DataArray(self._scalars["value"][here][order], {"step": steps}, ("step",), name)

    def _columns(self, table: str) -> dict[str, Any]:
        """The columns of a table by their last name, text as lists of str."""
        columns = [c for c in COLUMNS if c.path.startswith(f"{table}/")]
        with storage.reading(self.path) as file:
            read = {c.path.split("/")[1]: file[c.path][: self._sizes[c.axis]] for c in columns}
            return {
                name: [decode(cell, self._overflow) for cell in v.tolist()]
                if v.dtype.kind == "S"
                else v
                for name, v in read.items()
            }

    # Metrics

    def __contains__(self, name: object) -> bool:
        return name in _CLOCK or any(metric.name == name for metric in self.metrics)

    def __getitem__(self, name: str) -> "xr.DataArray":
        """A metric, or a column of the clock, with its coordinates; read from the file now."""
        import xarray as xr

        if name not in self:
            raise InputError(f"{self.path}: no metric {name!r}; it has: {', '.join(self._names())}")
        metric = next((m for m in self.metrics if m.name == name), None)
        axes = metric.axes if metric else (_CLOCK[name].axis,)
        _, order = _last_of_each(self._step if axes[0] == "step" else self._weight_step)
        with storage.reading(self.path) as file:
            dataset = file[name]
            where = tuple(
                slice(self._sizes.get(a, n)) for a, n in zip(axes, dataset.shape, strict=True)
            )
            values = dataset[where][order]
        attributes = (
            {key: getattr(metric, key) for key in storage.METRIC_ATTRIBUTES}
            if metric
            else {"definition": _CLOCK[name].meaning}
        )
        return xr.DataArray(values, self._coordinates(axes, values.shape), axes, name, attributes)

    def _names(self) -> Sequence[str]:
        return [metric.name for metric in self.metrics]

    def _coordinates(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Any]:
        coordinates: dict[str, Any] = {}
        for axis, size in zip(axes, shape, strict=True):
            steps = {"step": self.steps, "weight_step": self.weight_steps}.get(axis)
            coordinates[axis] = np.arange(size) if steps is None else steps
        if "site" in axes:
            coordinates |= _labels("site", self.sites, "path")
        if "parameter" in axes:
            coordinates |= _labels("parameter", self.parameters, "name")
        return coordinates

    def to_xarray(self) -> "xr.DataTree":
        """Everything measured, as a tree: ``tree["activation/variance"]``, ``tree["clock/cost"]``."""
        import xarray as xr

        groups: dict[str, dict[str, xr.DataArray]] = {}
        for name in (*_CLOCK, *self._names()):
            group, short = name.split("/")
            groups.setdefault(group, {})[short] = self[name]
        return xr.DataTree.from_dict(
            {g: xr.Dataset(v) for g, v in groups.items()}, name=self.metadata.name
        )

    def to_pandas(self, metrics: Sequence[str] = ()) -> "pd.DataFrame":
        """Everything measured as one tidy table, a number a row; see `dynscope.reading.table.to_pandas`."""
        from dynscope.reading.table import to_pandas

        return to_pandas(self, metrics)

    def __repr__(self) -> str:
        return (
            f"Run({str(self.path)!r}: {len(self.steps)} steps, {len(self.sites)} sites, "
            f"{len(self.parameters)} parameters{'' if self.metadata.closed else ', not closed'})"
        )


def load(path: str | os.PathLike[str]) -> Run:
    """Open a run file for reading; raises `InputError` when it is not one."""
    return Run(path)


def _metadata(attributes: dict[str, Any]) -> Metadata:
    return Metadata(
        name=decode(attributes["name"].encode()),
        created=attributes["created"],
        format_version=int(attributes["format_version"]),
        versions=json.loads(attributes["versions"]),
        config=json.loads(attributes["config"]),
        settings=json.loads(attributes["settings"]),
        world_size=int(attributes["world_size"]),
        closed=bool(attributes["closed"]),
        anatomy=decode(attributes.get("anatomy", "").encode()),
        segments=tuple(json.loads(attributes.get("segments", "[]"))),
    )


def _metrics(file: "h5py.File", names: Sequence[str]) -> tuple[Metric, ...]:
    """The metrics of a file in the order of the catalogue, the user's own after them."""
    axes = {name: _axes(file[name]) for name in names if name in file}
    order = {name: i for i, name in enumerate(METRICS)}
    return tuple(
        Metric(name, axes[name], **{k: file[name].attrs[k] for k in storage.METRIC_ATTRIBUTES})
        for name in sorted(axes, key=lambda n: order.get(n, len(order)))
    )


def _axes(dataset: "h5py.Dataset") -> tuple[str, ...]:
    names = [dimension[0].name for dimension in dataset.dims]
    if None in names:
        raise ValueError(f"{dataset.name} has lost an axis")
    return tuple(name.lstrip("/") for name in names)


def _last_of_each(steps: Ints) -> tuple[Ints, Ints]:
    """Distinct steps, ascending, and for each the index of its last occurrence."""
    distinct, first = np.unique(steps[::-1], return_index=True)
    return distinct, len(steps) - 1 - first


def _rows(columns: dict[str, Any]) -> list[dict[str, Any]]:
    plain = {k: v if isinstance(v, list) else v.tolist() for k, v in columns.items()}
    return [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]


def _labels(axis: str, items: Sequence[Site] | Sequence[Parameter], name: str) -> dict[str, Any]:
    """Coordinates along sites or parameters: path or name, role, stack, depth."""
    # xarray holds no lone surrogates, which a name may have.
    texts = {
        key: np.array(
            [getattr(i, key).encode("utf-8", "backslashreplace").decode() for i in items],
            dtype=object,
        )
        for key in (name, "role")
    }
    numbers = {
        k: np.array([getattr(i, k) for i in items], dtype=np.int64) for k in ("stack", "depth")
    }
    return {key: (axis, values) for key, values in (texts | numbers).items()}
