"""A run in the formats of other tools: CSV and Parquet (one long table), JSON and netCDF (arrays).

docs/export.md shows how each is read back.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynscope.errors import InputError
from dynscope.reading.run import Run
from dynscope.reading.table import COLUMNS, SCALAR, chosen, plain, tables

if TYPE_CHECKING:
    import xarray as xr

Progress = Callable[[str], object]

SUFFIXES: dict[str, str] = {"csv": ".csv", "parquet": ".parquet", "json": ".json", "netcdf": ".nc"}
"""The formats, each with the suffix of its files."""


def export(
    run: Run,
    path: Path,
    format: str,
    metrics: Sequence[str] = (),
    progress: Progress = lambda _: None,
) -> None:
    """Write ``run`` to ``path`` in one of the formats of `SUFFIXES`.

    ``metrics`` are names or patterns (``activation/*``), all by default; ``progress`` is told each
    that is begun. Raises `InputError` when one of them fits nothing and when the format's library
    is not installed.
    """
    names = chosen(run, metrics)
    write = {"csv": _csv, "parquet": _parquet, "json": _json, "netcdf": _netcdf}[format]
    write(run, path, names, progress)


def reading(path: Path, format: str) -> str:
    """How a file of a format is read in Python."""
    call = {
        "csv": "pandas.read_csv({!r}, keep_default_na=False)",
        "parquet": "pandas.read_parquet({!r})",
        "json": "json.load(open({!r}))",
        "netcdf": "xarray.open_datatree({!r})",
    }
    return call[format].format(str(path))


def _csv(run: Run, path: Path, names: Sequence[str], progress: Progress) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        stream.write(",".join(COLUMNS) + "\n")
        for table in tables(run, names, progress):
            table.to_csv(stream, header=False, index=False, lineterminator="\n")


def _parquet(run: Run, path: Path, names: Sequence[str], progress: Progress) -> None:
    """One row group a metric, whose statistics let a reader skip the others."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise _missing("Parquet", "pyarrow", "parquet") from None
    text = pa.dictionary(pa.int32(), pa.string())
    types = {"category": text, "int64": pa.int64(), "float64": pa.float64()}
    fields = [(name, types[kind]) for name, kind in COLUMNS.items()]
    schema = pa.schema(fields, metadata={"dynscope": json.dumps(_about(run))})
    with parquet.ParquetWriter(path, schema) as writer:
        for table in tables(run, names, progress):
            writer.write_table(pa.Table.from_pandas(table, schema, preserve_index=False))


def _json(run: Run, path: Path, names: Sequence[str], progress: Progress) -> None:
    """One object: what the run is, its axes, and under ``values`` each metric as nested lists."""
    values = {}
    for name in names:
        if not name.startswith(SCALAR):
            progress(name)
            values[name] = _listed(run[name].values)
    document = {
        **_about(run),
        "steps": run.steps.tolist(),
        "weight_steps": run.weight_steps.tolist(),
        "sites": [asdict(site) for site in run.sites],
        "parameters": [asdict(parameter) for parameter in run.parameters],
        "metrics": [asdict(metric) for metric in run.metrics if metric.name in names],
        "values": values,
        "scalars": {
            scalar: {"step": run.scalars(scalar)["step"].values.tolist(),
                     "value": _listed(run.scalars(scalar).values)}
            for scalar in _scalars(run, names)
        },
        "events": [asdict(event) for event in run.events],
        "coverage": [asdict(gap) for gap in run.coverage],
    }  # fmt: skip
    with path.open("w", encoding="utf-8") as stream:
        json.dump(document, stream, allow_nan=False)


def _netcdf(run: Run, path: Path, names: Sequence[str], progress: Progress) -> None:
    try:
        import h5netcdf  # noqa: F401
    except ModuleNotFoundError:
        raise _missing("netCDF", "h5netcdf", "netcdf") from None
    _tree(run, names, progress).to_netcdf(path, engine="h5netcdf")


def _tree(run: Run, names: Sequence[str], progress: Progress) -> "xr.DataTree":
    """A group of labelled arrays for each group of metrics, and the scalars as a long table."""
    import xarray as xr

    groups: dict[str, dict[str, xr.DataArray]] = {}
    for name in names:
        group, short = name.split("/", 1)
        if group + "/" != SCALAR:
            progress(name)
            groups.setdefault(group, {})[short] = _spelled(run[name])
    tree = {group: xr.Dataset(arrays) for group, arrays in groups.items()}
    scalars = {scalar: run.scalars(scalar) for scalar in _scalars(run, names)}
    if scalars:
        columns = {
            "step": np.concatenate([one["step"].values for one in scalars.values()]),
            "name": [plain(name) for name, one in scalars.items() for _ in range(one.size)],
            "value": np.concatenate([one.values for one in scalars.values()]),
        }
        tree["scalars"] = xr.Dataset({name: ("scalar", value) for name, value in columns.items()})
    about = {name: json.dumps(value) for name, value in _about(run).items()}
    return xr.DataTree.from_dict({"/": xr.Dataset(attrs=about), **tree})


def _spelled(array: "xr.DataArray") -> "xr.DataArray":
    """``array`` with names that netCDF can hold."""
    texts = {
        name: (array[name].dims, [plain(text) for text in array[name].values])
        for name in ("path", "name", "role")
        if name in array.coords
    }
    return array.assign_coords(texts)


def _scalars(run: Run, names: Sequence[str]) -> list[str]:
    return [scalar for scalar in run.scalar_names if SCALAR + plain(scalar) in names]


def _about(run: Run) -> dict[str, Any]:
    return {"file": run.path.name, **asdict(run.metadata)}


def _listed(values: Any) -> Any:
    """Nested lists with null where nothing was measured.

    Infinite numbers, which JSON lacks, are the strings "Infinity" and "-Infinity".
    """
    array = np.asarray(values)
    listed = array.astype(object)
    listed[array == -1 if array.dtype.kind == "i" else np.isnan(array)] = None
    listed[np.isposinf(array)] = "Infinity"
    listed[np.isneginf(array)] = "-Infinity"
    return listed.tolist()


def _missing(format: str, library: str, extra: str) -> InputError:
    return InputError(
        f"{format} needs {library}, which is not installed: pip install 'dynscope[{extra}]'"
    )
