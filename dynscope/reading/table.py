"""A run as one long table, a number a row, for pandas and for files that hold tables."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dynscope.catalogue import Metric
from dynscope.errors import InputError
from dynscope.runfile.schema import COLUMNS as FILE_COLUMNS

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

COLUMNS: dict[str, str] = {
    "step": "int64", "metric": "category", "of": "category", "name": "category",
    "role": "category", "stack": "int64", "depth": "int64", "top": "int64", "value": "float64",
}  # fmt: skip
"""The columns of the table and their pandas types."""

SCALAR = "scalars/"
_CLOCK = tuple(c.path for c in FILE_COLUMNS if c.path.startswith("clock/"))


class Recorded(Protocol):
    """What a table is made of: a `dynscope.Run`."""

    @property
    def path(self) -> Path: ...
    @property
    def metrics(self) -> tuple[Metric, ...]: ...
    @property
    def scalar_names(self) -> tuple[str, ...]: ...
    def scalars(self, name: str) -> "xr.DataArray": ...
    def __getitem__(self, name: str) -> "xr.DataArray": ...


def to_pandas(run: Recorded, metrics: Sequence[str] = ()) -> "pd.DataFrame":
    """Everything measured as one tidy table; see `COLUMNS`.

    ``metric`` is ``activation/variance`` and the like, also ``clock/cost`` and ``scalars/loss``.
    ``of`` says what it is a number of: ``site``, ``parameter``, ``group`` (of the optimizer) or
    ``run``; ``name`` names that, with its ``role``, ``stack`` and ``depth`` (-1 outside the
    blocks). ``top`` is 0, 1 or 2 among the three largest elements, else -1. What was not measured
    has no row. ``metrics`` are names or patterns (``activation/*``), all by default.

    Raises `InputError` when one of ``metrics`` fits nothing.
    """
    import pandas as pd
    from pandas.api.types import union_categoricals

    parts = list(tables(run, chosen(run, metrics)))
    columns: dict[str, Any] = {}
    for name, kind in COLUMNS.items():
        pieces = [part[name] for part in parts]
        if kind == "category":
            columns[name] = union_categoricals(pieces)
        else:
            columns[name] = np.concatenate([np.asarray(piece) for piece in pieces])
    return pd.DataFrame(columns)


def tables(
    run: Recorded, names: Sequence[str], progress: Callable[[str], object] = lambda _: None
) -> Iterator["pd.DataFrame"]:
    """The table of `to_pandas` metric by metric, so that it need not fit into memory.

    ``progress`` is told each that is begun.
    """
    for name in names:
        progress(name)
        yield _scalar(run, name) if name.startswith(SCALAR) else _metric(run, name)


def chosen(run: Recorded, patterns: Sequence[str]) -> tuple[str, ...]:
    """Names of the metrics, of the clock and of the scalars that fit any pattern; all by default."""
    scalars = (SCALAR + plain(name) for name in run.scalar_names)
    every = (*_CLOCK, *(metric.name for metric in run.metrics), *scalars)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise InputError(f"{run.path}: no metric fits {pattern!r}; it has: {', '.join(every)}")
    if not patterns:
        return every
    return tuple(name for name in every if any(fnmatchcase(name, one) for one in patterns))


def plain(text: str) -> str:
    """Text that every format can hold: without lone surrogates and NUL."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _scalar(run: Recorded, name: str) -> "pd.DataFrame":
    line = run.scalars(next(one for one in run.scalar_names if SCALAR + plain(one) == name))
    return _table(name, line["step"].values, line.values, {"of": "run"})


def _metric(run: Recorded, name: str) -> "pd.DataFrame":
    """The numbers of a metric that were measured, with the labels of their row and column."""
    array = run[name]
    values = np.asarray(array.values)
    places = np.nonzero(values != -1 if values.dtype.kind == "i" else ~np.isnan(values))
    steps = np.asarray(array[array.dims[0]].values)[places[0]]
    labels: dict[str, Any] = {"of": "run"}
    if len(places) > 1:
        labels = _labels(array, str(array.dims[1]), places[1])
    if len(places) > 2:
        labels["top"] = places[2]
    return _table(name, steps, values[places], labels)


def _labels(array: "xr.DataArray", axis: str, columns: Any) -> dict[str, Any]:
    """What the columns of an array stand for, one label an element."""
    if axis == "group":
        return {"of": axis, "name": _categories([str(i) for i in array[axis].values], columns)}
    texts = {"name": array["path" if axis == "site" else "name"], "role": array["role"]}
    numbers = {key: np.asarray(array[key].values)[columns] for key in ("stack", "depth")}
    return {"of": axis, **{k: _categories(v.values, columns) for k, v in texts.items()}, **numbers}


def _categories(texts: Iterable[str], codes: Any) -> Any:
    import pandas as pd

    distinct, place = np.unique([plain(text) for text in texts], return_inverse=True)
    return pd.Categorical.from_codes(place[codes], categories=distinct.tolist())


def _table(metric: str, steps: Any, values: Any, labels: dict[str, Any]) -> "pd.DataFrame":
    import pandas as pd

    nothing: dict[str, Any] = {"name": "", "role": "", "stack": 0, "depth": -1, "top": -1}
    columns = nothing | {"metric": metric, "step": steps, "value": values} | labels
    for name, kind in COLUMNS.items():
        if kind == "category" and isinstance(columns[name], str):
            columns[name] = _categories([columns[name]], np.zeros(len(steps), np.int64))
    numbers = {name: kind for name, kind in COLUMNS.items() if kind != "category"}
    return pd.DataFrame({name: columns[name] for name in COLUMNS}, range(len(steps))).astype(
        numbers
    )
