"""The scale of weights against learning rate and decay, from what a run file holds."""

from dataclasses import replace
from math import isnan
from pathlib import Path

import numpy as np
import pytest

from dynscope.analysis.saturation import _forgotten, saturation, scale_law
from dynscope.catalogue import METRICS
from dynscope.reading.run import Run, load
from dynscope.reports.cards import weights
from dynscope.reports.numbers.measured import Measured
from dynscope.runfile.schema import Header
from dynscope.site import Parameter
from dynscope.writing.writer import RunWriter

NAMES = ("optimizer/lr", "optimizer/weight_decay", "weight/weibull_lambda", "weight/weibull_k")
SHAPE = {"shape": (8, 8), "numel": 64}
PARAMETERS = (
    Parameter("a.up.weight", "up", depth=0, group=0, **SHAPE),  # type: ignore[arg-type]
    Parameter("b.up.weight", "up", depth=1, group=0, **SHAPE),  # type: ignore[arg-type]
    Parameter("b.q.weight", "q", depth=1, group=0, **SHAPE),  # type: ignore[arg-type]
    Parameter("b.down.weight", "down", depth=1, group=1, **SHAPE),  # type: ignore[arg-type]
    Parameter("a.up.bias", "up", depth=0, shape=(8,), numel=8, group=0),
)
STEPS, EVERY = 400, 10


def rate(step: int) -> float:
    return 1e-2 * min(1.0, step / 50)


def written(path: Path, coefficient: float = 0.1, decay: float = 0.5) -> Run:
    """A run whose lambda is ``coefficient`` sqrt(eta / decay) at every step; group 1 never decays."""
    writer = RunWriter(path, Header(tuple(METRICS[n] for n in NAMES), optimizer_groups=2))
    writer.parameters(PARAMETERS)
    for step in range(EVERY, STEPS + 1, EVERY):
        values = {
            "optimizer/lr": np.array([rate(step), 1e-2]),
            "optimizer/weight_decay": np.array([decay, 0.0]),
        }
        writer.row(step, 0.0, values)
        scale = coefficient * np.sqrt(rate(step) / decay)
        lam = scale * np.array([0.9, 1.1, 50.0, 70.0, np.nan])
        writer.weights(step, 0.0, {NAMES[2]: lam, NAMES[3]: np.full(5, 1.2)})
    writer.close()
    return load(path)


def test_what_is_forgotten_is_the_sum_over_every_step(tmp_path: Path) -> None:
    (found,) = saturation(written(tmp_path / "run.h5"))
    assert found.group == 0
    # From one recorded step to the next learning rates follow a straight line, as they do here.
    expected = sum(rate(step) * 0.5 for step in range(1, STEPS + 1))
    assert found.forgotten[-1] == pytest.approx(
        expected, rel=3e-3
    )  # ten steps came before the first
    assert found.word == "saturated" and found.forgotten[0] < 0.2
    np.testing.assert_allclose(found.lam, 0.1 * found.scale, rtol=1e-6)
    assert found.peak_scale[-1] == pytest.approx(np.sqrt(1e-2 / 0.5))


def test_the_law_is_found_again(tmp_path: Path) -> None:
    (found,) = saturation(written(tmp_path / "run.h5", coefficient=0.123))
    law = scale_law(found.scale, found.lam)
    assert law.coefficient == pytest.approx(0.123, rel=1e-6) and law.r == pytest.approx(1)
    assert law.points == STEPS // EVERY


def test_a_law_without_spread_has_no_r() -> None:
    law = scale_law(np.full(5, 0.1), np.linspace(1, 2, 5))
    assert law.coefficient == pytest.approx(15) and isnan(law.r)
    assert isnan(scale_law(np.array([np.nan]), np.array([1.0])).coefficient)


def test_a_run_without_decay_has_none(tmp_path: Path) -> None:
    run = written(tmp_path / "run.h5", decay=0.5)
    assert weights.scale_card(Measured(run)) is not None
    path = tmp_path / "none.h5"
    writer = RunWriter(path, Header(tuple(METRICS[n] for n in NAMES), optimizer_groups=1))
    writer.parameters([replace(PARAMETERS[0], group=0)])
    zeros = {"optimizer/lr": np.array([0.1]), "optimizer/weight_decay": np.array([0.0])}
    writer.row(1, 0.0, zeros)
    writer.weights(1, 0.0, {NAMES[2]: np.array([0.1]), NAMES[3]: np.array([1.2])})
    writer.close()
    assert saturation(load(path)) == () and weights.scale_card(Measured(load(path))) is None


def test_a_comparison_fits_the_law_through_all_runs(tmp_path: Path) -> None:
    decays = (0.1, 0.4, 1.0)
    runs = [written(tmp_path / f"{d}.h5", decay=d) for d in decays]
    table = weights.scale_table([(str(i), Measured(run)) for i, run in enumerate(runs)])
    assert table is not None and [row[0] for row in table.rows] == ["0", "1", "2"]
    assert "λ = 0.1 √(η/decay) over 3 points, r = 1.00" in table.remark


@pytest.mark.parametrize("every", [1, 7])
def test_the_sum_is_exact_where_the_rate_is_known(every: int) -> None:
    steps = np.arange(1, 7 * 60 + 2)
    rates = 1e-3 * (1 - steps / 500)
    recorded = slice(0, None, every)
    found = _forgotten(steps[recorded], rates[recorded])
    np.testing.assert_allclose(found, np.cumsum(rates)[recorded], rtol=1e-12)
