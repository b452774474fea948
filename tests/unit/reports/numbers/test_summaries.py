"""What is drawn equals what is in the run."""

from pathlib import Path

import numpy as np
import pytest

from dynscope.analysis.depth import growth_law
from dynscope.catalogue import METRICS
from dynscope.reading.run import Run
from dynscope.reports.numbers.measured import Measured, block_ratio
from dynscope.reports.numbers.summaries import massive, profile, without_twins
from dynscope.reports.wording import facts, overview
from tests.factories import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(make_run(tmp_path_factory.mktemp("runs") / "run.h5", blocks=5, steps=12))


def test_a_profile_holds_the_run_s_own_numbers(run: Run) -> None:
    found = profile(Measured(run), METRICS["activation/variance"])
    stream = found.series[0]
    array = run["activation/variance"]
    expected = array.values[:, array.role.values == "block"]
    assert stream.curve.label == "residual stream"
    np.testing.assert_array_equal(stream.values, expected)


def test_the_law_drawn_is_that_of_the_residual_stream_at_each_step(run: Run) -> None:
    found = profile(Measured(run), METRICS["activation/variance"])
    assert found.laws is not None
    expected = growth_law(found.series[0].curve.depths, found.series[0].values[3])
    assert found.laws.laws[3] == expected
    np.testing.assert_allclose(found.laws.values[3], expected.at(found.laws.depths))


def test_the_global_gradient_norm_counts_every_parameter_once(run: Run) -> None:
    squares = run["gradient/norm"].values.astype(np.float64) ** 2
    expected = [sum(row) ** 0.5 for row in squares]
    np.testing.assert_allclose(Measured(run).gradient_norm, expected, rtol=1e-12)


def test_a_block_s_relative_update_follows_from_its_parameters(run: Run) -> None:
    found = block_ratio(Measured(run))
    assert found is not None
    indices, ratio = found
    own = [p.depth == 2 for p in run.parameters]
    norm, relative = (
        run[name].values[4, own].astype(float) for name in ("update/norm", "update/ratio")
    )
    expected = (norm**2).sum() ** 0.5 / ((norm / relative) ** 2).sum() ** 0.5
    assert indices.tolist() == [0, 1, 2, 3, 4]
    assert ratio[4, 2] == pytest.approx(expected)


def test_massive_activations_keep_channel_and_token(run: Run) -> None:
    found = massive(Measured(run))
    assert found is not None
    column = int(found.curve.columns[3])
    assert found.channel[-1, 3].tolist() == run["massive/channel"].values[-1, column].tolist()
    assert found.magnitude[-1, 3, 0] == abs(run["massive/value"].values[-1, column, 0])


def test_the_largest_activation_is_found_in_all_rows(run: Run) -> None:
    top = facts.largest(Measured(run))
    assert top is not None
    assert top.value == pytest.approx(float(run["activation/absmax"].max()))


def test_the_summary_names_the_first_non_finite_site(tmp_path: Path) -> None:
    measured = Measured(Run(make_run(tmp_path / "bad.h5", blocks=3, steps=4)))
    counts = measured.array("activation/nonfinite_count")
    place = [site.path for site in measured.run.sites].index("blocks.1.ffn")
    counts[2:, place:] = 7
    texts = [one.text for one in overview.statements(measured)]
    assert any("first at step 3 in blocks.1.ffn" in text for text in texts)


@pytest.mark.parametrize(
    ("losses", "risen"),
    [
        ((4.0, 2.0, 3.0), True), ((4.0, 2.9, 3.0), False),
        ((2.28, -1.0, -3.41), False), ((2.28, -3.41, -2.0), True), ((-1.0, -3.0, -2.9), False),
    ],
)  # fmt: skip
def test_the_summary_tells_a_loss_that_rose_again_whatever_its_sign(
    run: Run, monkeypatch: pytest.MonkeyPatch, losses: tuple[float, ...], risen: bool
) -> None:
    line = (np.array([1, 2, 3], np.int64), np.array(losses))
    monkeypatch.setattr(Measured, "scalar", lambda measured, name: line)
    (text,) = (s.text for s in overview.statements(Measured(run)) if s.card == "training-loss")
    assert ("it was lowest" in text) == risen


def test_the_summary_names_idle_blocks(tmp_path: Path) -> None:
    measured = Measured(Run(make_run(tmp_path / "idle.h5", blocks=6, steps=4)))
    for name in ("update/norm", "update/ratio"):
        array = measured.array(name)
        array[:, [p.depth >= 4 for p in measured.run.parameters]] *= 1e-3
    texts = [one.text for one in overview.statements(measured)]
    assert any(text.startswith("Blocks 4–5 idle") for text in texts)


def test_the_summary_speaks_of_one_block_in_the_singular(tmp_path: Path) -> None:
    for blocks, begin in ((4, "The first block turns"), (9, "The first 2 blocks turn")):
        measured = Measured(Run(make_run(tmp_path / f"{blocks}.h5", blocks=blocks, steps=2)))
        texts = [one.text for one in overview.statements(measured)]
        assert any(text.startswith(begin) for text in texts)


def test_a_sublayer_that_puts_out_the_stream_is_told_once_and_not_drawn(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "bert.h5", blocks=3, steps=3))
    measured = Measured(run)
    roles = np.array([site.role for site in run.sites])
    for name in ("rms", "absmax", "mean_abs", "variance"):
        array = measured.array(f"activation/{name}")
        array[:, roles == "ffn"] = array[:, roles == "block"] * (1 + 1e-7)
    assert [curve.label for curve in measured.twins] == ["FFN"]
    found = without_twins(measured, profile(measured, METRICS["activation/variance"]))
    assert [one.curve.label for one in found.series][:2] == ["residual stream", "attention"]
    ratio = without_twins(measured, profile(measured, METRICS["activation/branch_ratio"]))
    assert "FFN" in [one.curve.label for one in ratio.series]
    assert Measured(run).twins == ()
