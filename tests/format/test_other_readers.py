"""A run opens with the libraries that people use, without dynscope."""

import shutil
import subprocess
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr

from dynscope.reading.run import load
from tests.factories import make_run


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("readers") / "run.h5")


@pytest.mark.parametrize("engine", ["h5netcdf", "netcdf4"])
def test_xarray_reads_a_closed_file_with_its_dimensions(path: Path, engine: str) -> None:
    with xr.open_datatree(path, engine=engine) as tree:
        variance = tree["activation/variance"]
        assert variance.dims == ("step", "site")
        np.testing.assert_array_equal(variance, load(path)["activation/variance"])
        assert tree["massive/value"].dims == ("step", "site", "top")
        assert tree["optimizer/lr"].dims == ("step", "group")
        assert np.asarray(tree["step"]).tolist() == list(range(1, 11))
        first = np.asarray(tree["sites/path"])[1]
        assert (first.decode() if isinstance(first, bytes) else first) == "blocks.0.attention"


def test_netcdf4_reads_a_closed_file_and_every_variable_in_it(path: Path) -> None:
    def visit(group: netCDF4.Dataset) -> int:
        here = sum(int(v[:].size) for v in group.variables.values())
        return here + sum(map(visit, group.groups.values()))

    with netCDF4.Dataset(path) as dataset:
        assert dataset["activation/variance"].dimensions == ("step", "site")
        assert dataset.dimensions["site"].size == 14
        assert visit(dataset) > 1000


def test_xarray_reads_a_live_file_as_the_page_says(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run.h5", close=False)
    with xr.open_dataset(
        path, engine="h5netcdf", group="activation", driver_kwds={"swmr": True}
    ) as dataset:
        assert dataset["variance"].shape == (10, 14)


@pytest.mark.skipif(not shutil.which("h5dump"), reason="HDF5's tools are not installed")
def test_h5dump_reads_a_closed_file(path: Path) -> None:
    command = ["h5dump", "-d", "/activation/variance", str(path)]
    assert "4.5" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_own_labelled_tree_can_be_saved_as_netcdf_and_read_back(
    path: Path, tmp_path: Path
) -> None:
    tree = load(path).to_xarray()
    tree.to_netcdf(tmp_path / "out.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "out.nc", engine="h5netcdf") as again:
        np.testing.assert_array_equal(again["update/ratio"], tree["update/ratio"])
        assert again["activation"].dataset["path"].equals(tree["activation"].dataset["path"])
