"""What `dynscope export` writes is what the run holds, read back by the library of each format."""

import json
import sys
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from pyarrow import parquet

import dynscope
from dynscope.catalogue import bundle
from dynscope.errors import InputError
from dynscope.reading.export import SUFFIXES, export
from dynscope.reading.table import COLUMNS
from dynscope.runfile.schema import Header
from dynscope.site import Site
from dynscope.writing.writer import RunWriter
from tests.factories import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dynscope.Run:
    return dynscope.load(make_run(tmp_path_factory.mktemp("export") / "run.h5"))


def written(run: dynscope.Run, folder: Path, format: str, *metrics: str) -> Path:
    path = folder / f"out{SUFFIXES[format]}"
    export(run, path, format, metrics)
    return path


def assert_holds(table: pd.DataFrame, run: dynscope.Run, name: str) -> None:
    """The rows of ``name`` are the measured numbers of the run, each with its labels."""
    own = table[table["metric"] == name]
    array = run[name]
    values = np.asarray(array.values)
    measured = values != -1 if values.dtype.kind == "i" else ~np.isnan(values)
    assert len(own) == measured.sum()
    axis = array.dims[1] if array.ndim > 1 else "run"
    assert set(own["of"]) <= {axis}
    for row in own.iloc[:: max(1, len(own) // 50)].itertuples():
        here: Any = array.sel({array.dims[0]: row.step})
        if axis in ("site", "parameter"):
            here = here[here["path" if axis == "site" else "name"] == row.name]
            labels = (
                str(here["role"].item()),
                int(here["depth"].item()),
                int(here["stack"].item()),
            )
            assert (row.role, row.depth, row.stack) == labels
        elif axis == "group":
            here = here.sel(group=int(str(row.name)))
        if array.ndim > 2:
            here = here[..., row.top]
        assert float(here.item()) == row.value


def test_the_table_holds_every_number_with_its_labels(run: dynscope.Run) -> None:
    table = run.to_pandas()
    assert {name: str(kind) for name, kind in table.dtypes.items()} == COLUMNS
    for name in [metric.name for metric in run.metrics] + ["clock/cost", "clock/weight_time"]:
        assert_holds(table, run, name)
    loss = table[table["metric"] == "scalars/loss"].set_index("step")["value"]
    assert loss.to_dict() == run.scalars("loss").to_series().to_dict()


def test_a_pattern_chooses_metrics_and_one_that_fits_nothing_is_refused(run: dynscope.Run) -> None:
    table = run.to_pandas(["activation/r*", "scalars/loss"])
    assert set(table["metric"]) == {"activation/rms", "scalars/loss"}
    with pytest.raises(InputError, match=r"no metric fits 'activations/rms'.*activation/rms"):
        run.to_pandas(["activations/rms"])


def test_pandas_reads_the_csv(run: dynscope.Run, tmp_path: Path) -> None:
    table = pd.read_csv(written(run, tmp_path, "csv"), keep_default_na=False)
    pd.testing.assert_frame_equal(table.astype(COLUMNS), run.to_pandas(), check_categorical=False)


def test_pandas_and_pyarrow_read_the_parquet(run: dynscope.Run, tmp_path: Path) -> None:
    path = written(run, tmp_path, "parquet")
    table = pd.read_parquet(path)
    pd.testing.assert_frame_equal(table, run.to_pandas(), check_categorical=False)
    rows = parquet.read_table(path, filters=[("metric", "==", "activation/rms")])
    assert rows.num_rows == run["activation/rms"].size
    about = json.loads(rows.schema.metadata[b"dynscope"])
    assert about["name"] == "synthetic" and about["config"] == run.metadata.config


def test_json_reads_the_json(run: dynscope.Run, tmp_path: Path) -> None:
    document = json.loads(written(run, tmp_path, "json").read_text())
    assert document["steps"] == run.steps.tolist()
    assert [site["path"] for site in document["sites"]] == [site.path for site in run.sites]
    assert document["config"] == run.metadata.config
    assert document["scalars"]["loss"]["value"] == run.scalars("loss").values.tolist()
    for metric in run.metrics:
        stored = np.array(document["values"][metric.name], np.float64)
        array = run[metric.name].values.astype(np.float64)
        if metric.name.startswith("massive/") and metric.name != "massive/value":
            array[array == -1] = np.nan
        np.testing.assert_array_equal(stored, array)


def test_xarray_and_netcdf4_read_the_netcdf(run: dynscope.Run, tmp_path: Path) -> None:
    path = written(run, tmp_path, "netcdf")
    for engine in ("h5netcdf", "netcdf4"):
        with xr.open_datatree(path, engine=engine) as tree:
            for metric in run.metrics:
                found = tree[metric.name].load().rename(metric.name)
                xr.testing.assert_identical(found, run[metric.name])
            scalars = tree["scalars"].to_dataset()
            loss = scalars["value"][scalars["name"] == "loss"]
            np.testing.assert_array_equal(loss, run.scalars("loss"))
            assert json.loads(tree.attrs["config"]) == run.metadata.config
    with netCDF4.Dataset(path) as dataset:
        assert dataset["activation/variance"].dimensions == ("step", "site")
        assert dataset["activation/path"][1] == "blocks.0.attention"


@pytest.mark.parametrize("format", SUFFIXES)
def test_missing_and_infinite_numbers_and_odd_names_survive(tmp_path: Path, format: str) -> None:
    names = ('a,"b"\n', "nul\0", "lone \ud800", "")
    writer = RunWriter(tmp_path / "run.h5", Header(bundle("light")))
    writer.sites([Site(name, "other") for name in names])
    writer.row(1, 0.0, {"activation/absmax": np.array([np.inf, np.nan, -1.0, 2.5])})
    writer.scalars(1, 0.0, {"odd[*] / name": 7.0})
    writer.close()
    path = written(dynscope.load(tmp_path / "run.h5"), tmp_path, format)
    spelled = ['a,"b"\n', "nul\\x00", "lone \\ud800", ""]
    if format == "json":
        document = json.loads(path.read_text())
        assert document["values"]["activation/absmax"] == [["Infinity", None, -1.0, 2.5]]
        assert [site["path"] for site in document["sites"]] == list(names)
        assert document["scalars"]["odd[*] / name"]["value"] == [7.0]
    elif format == "netcdf":
        with xr.open_datatree(path) as tree:
            absmax = tree["activation"].to_dataset()["absmax"]
            assert list(absmax["path"].values) == spelled
            np.testing.assert_array_equal(absmax[0], [np.inf, np.nan, -1, 2.5])
            assert list(tree["scalars"].to_dataset()["name"].values) == ["odd[*] / name"]
    else:
        csv = format == "csv"
        table = pd.read_csv(path, keep_default_na=False) if csv else pd.read_parquet(path)
        own = table[table["metric"] == "activation/absmax"]
        assert own["name"].tolist() == [spelled[0], *spelled[2:]]
        assert own["value"].tolist() == [np.inf, -1, 2.5]
        assert "scalars/odd[*] / name" in set(table["metric"])


@pytest.mark.parametrize("format", SUFFIXES)
def test_a_run_without_any_row_can_be_exported(tmp_path: Path, format: str) -> None:
    RunWriter(tmp_path / "run.h5", Header(bundle("full"))).close()
    assert written(dynscope.load(tmp_path / "run.h5"), tmp_path, format).stat().st_size


@pytest.mark.parametrize(
    ("format", "library", "extra"),
    [("parquet", "pyarrow", "parquet"), ("netcdf", "h5netcdf", "netcdf")],
)
def test_a_format_without_its_library_names_the_extra(
    run: dynscope.Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,
    library: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf"needs {library}.*pip install 'dynscope\[{extra}\]'"):
        written(run, tmp_path, format)
