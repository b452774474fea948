"""docs/file-format.md says what is in a file that was just written, no more and no less."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from dynscope.catalogue import METRICS
from dynscope.runfile.schema import COLUMNS, GROWING, metric_dtype
from tests.factories import make_run

PAGE = (Path(__file__).parents[2] / "docs" / "file-format.md").read_text()
TYPES = {"f8": "float64", "i8": "int64", "f4": "float32"}


def table(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


@pytest.fixture(scope="module", params=[True, False], ids=["closed", "live"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> h5py.File:
    path = make_run(tmp_path_factory.mktemp("format") / "run.h5", close=request.param)
    return h5py.File(path, "r", swmr=True)


def spelled(dtype: np.dtype) -> str:
    return f"S{dtype.itemsize}" if dtype.kind == "S" else str(dtype)


def test_root_attributes_are_those_of_the_page(file: h5py.File) -> None:
    documented = {row[0]: row[1] for row in table("Attributes of the root")}
    assert set(documented) == set(file.attrs)
    for name, kind in documented.items():
        is_integer = isinstance(file.attrs[name], np.integer)
        assert is_integer == (kind == "integer"), name


def test_axes_are_those_of_the_page(file: h5py.File) -> None:
    rows = table("Axes")
    assert {row[0] for row in rows} == {f"/{n}" for n in file if isinstance(file[n], h5py.Dataset)}
    for name, kind, grows, _ in rows:
        assert file[name].is_scale, name
        assert (file[name].maxshape == (None,)) == (grows == "yes"), name
        assert not kind or str(file[name].dtype) == kind, name
    assert [row[0].strip("/") for row in rows if row[2] == "yes"] == list(GROWING)


def test_datasets_are_those_of_the_page(file: h5py.File) -> None:
    rows = {row[0]: tuple(row[1:]) for row in table("Datasets")}
    assert rows == {f"/{c.path}": (c.axis, TYPES.get(c.dtype, c.dtype), c.meaning) for c in COLUMNS}
    for name, (axis, kind, meaning) in rows.items():
        assert file[name].dims[0][0].name == f"/{axis}", name
        assert spelled(file[name].dtype) == kind, name
        assert file[name].attrs["meaning"] == meaning, name


def test_metrics_are_those_of_the_catalogue_with_the_types_of_the_page(file: h5py.File) -> None:
    inside: list[str] = []
    file.visititems(
        lambda name, item: inside.append(name) if isinstance(item, h5py.Dataset) else None
    )
    columns = {c.path for c in COLUMNS}
    assert {n for n in inside if "/" in n} - columns == set(METRICS)
    for name, metric in METRICS.items():
        assert [d[0].name.strip("/") for d in file[name].dims] == list(metric.axes)
        assert file[name].dtype == np.dtype(metric_dtype(name))
        assert all(file[name].attrs[key] == getattr(metric, key) for key in ("unit", "reading"))


def test_reserved_groups_are_told() -> None:
    groups = {c.path.split("/")[0] for c in COLUMNS}
    assert all(re.search(rf"`/{group}/", PAGE) for group in groups)
