"""Reading a run: labels, order, what is missing, and what is told when it is not there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from dynscope.catalogue import METRICS, bundle
from dynscope.errors import InputError
from dynscope.reading.run import Run, load
from dynscope.runfile.schema import Header
from dynscope.site import Parameter, Site
from dynscope.writing.repair import repair
from dynscope.writing.writer import RunWriter
from tests.factories import make_parameters, make_run, make_sites


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load(make_run(tmp_path_factory.mktemp("run") / "run.h5", every=10))


def test_every_metric_of_the_catalogue_comes_back_with_numbers(run: Run) -> None:
    assert [metric.name for metric in run.metrics] == list(METRICS)
    assert run.metrics == tuple(METRICS.values())
    for metric in run.metrics:
        values = run[metric.name]
        assert values.dims == metric.axes
        assert np.isfinite(values.values).any(), metric.name
        assert values.attrs["unit"] == metric.unit


def test_sites_parameters_and_coordinates_are_those_that_were_written(run: Run) -> None:
    assert run.sites == make_sites(4)
    assert run.parameters == make_parameters(4)
    variance = run["activation/variance"]
    assert variance["path"].values.tolist() == [site.path for site in run.sites]
    assert variance["role"].values.tolist() == [site.role for site in run.sites]
    assert variance["depth"].values.tolist() == [site.depth for site in run.sites]
    assert run["gradient/norm"]["name"].values[0] == "embed.weight"
    assert run.steps.tolist() == list(range(1, 101, 10))
    assert run.weight_steps.tolist() == [1, 11, 21, 41, 81, 91]


def test_clock_scalars_events_and_metadata(run: Run) -> None:
    assert run["clock/tokens"].values.tolist() == [4096 * step for step in run.steps]
    assert run["clock/cost"].dims == ("step",)
    assert run.scalar_names == ("loss", "gradient_norm")
    assert run.scalars("loss")["step"].values.tolist() == run.steps.tolist()
    assert run.events[0].kind == "start"
    assert run.coverage[0].reason == "input and output differ"
    assert run.metadata.settings["every"] == 10
    assert run.metadata.closed


def test_what_is_not_there_is_named_in_one_line(run: Run) -> None:
    with pytest.raises(InputError, match="no metric 'activation/nope'; it has: activation/n_calls"):
        run["activation/nope"]
    with pytest.raises(InputError, match="no scalar 'accuracy'; it has: loss, gradient_norm"):
        run.scalars("accuracy")
    assert "activation/nope" not in run
    assert "activation/rms" in run
    assert "clock/cost" in run


def test_the_tree_holds_every_group(run: Run) -> None:
    tree = run.to_xarray()
    xr.testing.assert_identical(tree["activation/rms"].variable, run["activation/rms"].variable)
    assert set(tree.children) == {m.group for m in METRICS.values()} | {"clock"}


def test_a_run_without_any_row_opens(tmp_path: Path) -> None:
    RunWriter(tmp_path / "run.h5", Header(tuple(METRICS.values()))).close()
    run = load(tmp_path / "run.h5")
    assert run.steps.shape == (0,)
    assert run["activation/rms"].shape == (0, 0)
    assert run.last_step == run.segments == 0
    assert run.scalar_names == ()


def test_a_site_that_comes_later_is_nan_before_and_a_missing_metric_too(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.h5", Header(tuple(METRICS.values())))
    writer.sites([Site("a", "block")])
    writer.row(1, 0.0, {"activation/rms": np.array([1.0])})
    writer.flush()
    writer.sites([Site("b", "block")])
    writer.row(2, 0.0, {"activation/rms": np.array([2.0, 3.0])})
    writer.close()
    run = load(tmp_path / "run.h5")
    np.testing.assert_array_equal(run["activation/rms"].values, [[1, np.nan], [2, 3]])
    assert np.isnan(run["activation/mean"].values).all()
    assert (run["massive/channel"].values == -1).all()


def test_wrong_values_lose_their_metric_only_and_are_told_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.h5", Header(tuple(METRICS.values()), optimizer_groups=1))
    writer.sites([Site("a", "block")])
    for step in (1, 2):
        writer.row(step, 0.0, {
            "activation/rms": np.array([1.0]), "activation/mean": np.zeros(7),
            "massive/value": np.zeros((1, 5)), "optimizer/lr": np.zeros(3),
        })  # fmt: skip
        writer.row(step, 0.0, {"gradient/norm": np.zeros(1)}, via="nonsense")
    writer.close()
    run = load(tmp_path / "run.h5")
    assert run["activation/rms"].shape == (2, 1)
    assert len(run.events) == 4
    assert {event.kind for event in run.events} == {"error"}


def test_repair_closes_a_killed_run_and_changes_nothing_else(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run.h5", close=False)
    before = load(path).to_xarray()
    run = repair(path)
    assert run.metadata.closed
    assert run.to_xarray().identical(before)
    assert run.segments == 1


def test_resuming_refuses_a_metric_whose_axes_have_changed(tmp_path: Path) -> None:
    from dataclasses import replace

    rms = METRICS["activation/rms"]
    RunWriter(tmp_path / "run.h5", Header((rms,))).close()
    with pytest.raises(InputError, match="has axes"):
        changed = Header((replace(rms, axes=("step", "parameter")),))
        RunWriter(tmp_path / "run.h5", changed, resume=True)
    assert load(tmp_path / "run.h5").metadata.closed


def test_overwriting_replaces_runs_and_empty_files_only(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    path.write_bytes(b"")
    RunWriter(path, Header((METRICS["activation/rms"],)), overwrite=True).close()
    RunWriter(path, Header((METRICS["activation/mean"],)), overwrite=True).close()
    assert [metric.name for metric in load(path).metrics] == ["activation/mean"]
    path.write_text("my thesis")
    choices: list[dict[str, Any]] = [{}, {"overwrite": True}, {"resume": True}]
    for choice in choices:
        with pytest.raises(InputError):
            RunWriter(path, Header(()), **choice)
    assert path.read_text() == "my thesis"
    assert [p.name for p in tmp_path.iterdir()] == ["run.h5"]


def test_a_parameter_has_the_depth_of_the_layer_that_owns_it(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.h5", Header(bundle("light")))
    writer.parameters([Parameter(name, "ffn") for name in ("a.weight", "b.weight", "c.weight")])
    writer.sites([Site("b", "ffn", depth=1), Site("a", "ffn", depth=0)])  # by order of calls
    writer.row(1, 0.0, {"gradient/norm": np.ones(3)})
    writer.close()
    run = load(tmp_path / "run.h5")
    assert run["gradient/norm"]["depth"].values.tolist() == [0, 1, -1]
