"""Runs side by side: what is common, what differs."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dynscope.catalogue import METRICS
from dynscope.errors import InputError
from dynscope.reading.run import Run
from dynscope.reports import compare
from dynscope.reports.drawing.overlays import relative_depth
from dynscope.reports.numbers.measured import Measured
from dynscope.reports.numbers.pairing import (
    Side,
    difference_of,
    differences,
    labels_of,
    only_in,
    settings_that_differ,
)
from dynscope.runfile.schema import Header
from dynscope.site import Parameter, Site
from dynscope.writing.writer import RunWriter
from tests.factories import make_run


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Side, Side]:
    folder = tmp_path_factory.mktemp("runs")
    a = make_run(folder / "a.h5", blocks=4, steps=10, name="first")
    b = make_run(folder / "b.h5", blocks=6, steps=7, every=2, seed=1, name="second")
    return Side(0, "first", Measured(Run(a))), Side(1, "second", Measured(Run(b)))


def test_differences_are_of_common_layers_at_common_steps(sides: tuple[Side, Side]) -> None:
    found = differences(sides, METRICS["activation/variance"], 100)
    stream = found[0]
    assert stream.steps.tolist() == [1, 3, 5, 7, 9]
    assert stream.series.curve.depths.tolist() == [0, 1, 2, 3]
    a, b = (side.measured.run["activation/variance"] for side in sides)
    ours, theirs = (
        [site.path for site in side.measured.run.sites].index("blocks.2") for side in sides
    )
    expected = np.log10(b.sel(step=5)[theirs] / a.sel(step=5)[ours])
    assert stream.series.values[2, 2] == pytest.approx(float(expected))


def test_what_only_one_run_has_is_listed(sides: tuple[Side, Side]) -> None:
    listed = set(only_in(sides))
    assert ("layer", "blocks.5.ffn", "b") in listed
    assert not any(name == "blocks.3" for _, name, _ in listed)


def test_equal_values_differ_by_nothing_also_where_they_are_zero_or_infinite() -> None:
    values = np.array([0.0, np.inf, 3.0])
    assert difference_of(values, values, ratio=True).tolist() == [0, 0, 0]
    assert difference_of(values, values, ratio=False).tolist() == [0, 0, 0]


def test_nested_configurations_are_compared_entry_by_entry() -> None:
    one, two = {"lr": 1e-3, "model": {"norm": "pre", "d": 4}}, {"model": {"norm": "mix", "d": 4}}
    assert settings_that_differ([one, two]) == {"lr": ("0.001", "–"), "model.norm": ("pre", "mix")}


def test_relative_depth_runs_from_the_first_block_to_the_last(sides: tuple[Side, Side]) -> None:
    stream = sides[1].measured.stream
    assert stream is not None
    assert relative_depth(stream, sides[1].blocks)[[0, -1]].tolist() == [0, 1]


def test_without_blocks_the_depth_of_a_run_is_its_number_of_layers(tmp_path: Path) -> None:
    sites = [Site("c", "conv", 0, 0), Site("f", "ffn", 0, 1), Site("act", "activation", 0, 1)]
    head = Parameter("head.weight", "head", 0, 2, (2, 2), 4)
    with closing(RunWriter(tmp_path / "net.h5", Header((METRICS["activation/rms"],)))) as writer:
        writer.sites(sites)
        writer.parameters([head])
        writer.row(1, 1.7e9, {"activation/rms": np.ones(3, np.float32)})
    side = Side(0, "net", Measured(Run(tmp_path / "net.h5")))
    assert side.blocks == 3


def test_runs_with_one_name_are_told_apart_by_their_files(tmp_path: Path) -> None:
    runs = [Run(make_run(tmp_path / f"{name}.h5", blocks=1, steps=1)) for name in "xy"]
    assert labels_of(runs) == ("x", "y")


def test_one_run_or_too_few_labels_are_refused(sides: tuple[Side, Side]) -> None:
    run = sides[0].measured.run
    with pytest.raises(InputError, match="2 to 26 runs"):
        compare([run])
    with pytest.raises(InputError, match="1 labels for 2 runs"):
        compare([run, run], ["only"])


def test_a_value_that_only_one_run_has_is_a_difference(tmp_path: Path) -> None:
    one, two = (
        Side(place, "x", Measured(Run(make_run(tmp_path / f"{place}.h5", blocks=2, steps=3))))
        for place in (0, 1)
    )
    metric = METRICS["activation/rms"]
    assert all(found.equal for found in differences((one, two), metric, 10))
    two.measured.array(metric.name)[1, :] = np.nan
    assert not any(found.equal for found in differences((one, two), metric, 10))
