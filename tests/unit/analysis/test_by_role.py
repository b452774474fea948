"""Weights role by role: the medians, their error, and what stands in for a pooled fit."""

from pathlib import Path

import numpy as np
import pytest

from dynscope.analysis.by_role import by_role, lines, neighbours
from dynscope.catalogue import METRICS
from dynscope.reading.run import Run, load
from dynscope.reports.numbers.measured import Measured
from dynscope.reports.wording.weights import verdicts
from dynscope.runfile.schema import Header
from dynscope.site import POOLED, Parameter
from dynscope.writing.writer import RunWriter

FIT = ("k", "lambda", "r2", "n", "k_standard_error")
MATRIX = (1024, 1024)


def written(path: Path, k: dict[str, list[float]], pooled: float = np.nan) -> Run:
    """A run of layers whose matrices have these k; ``pooled`` is that of all gates together."""
    parameters, values = [], []
    for role, column in k.items():
        for depth, value in enumerate(column):
            numel = int(np.prod(MATRIX))
            parameters.append(Parameter(f"{depth}.{role}.weight", role, 0, depth, MATRIX, numel))
            values.append([value, 0.02, 0.99, numel, 0.0013])
    if np.isfinite(pooled):
        parameters.append(Parameter("[all gate]", "gate", 0, -1, (3,), 3 << 20, part_of=POOLED))
        values.append([pooled, 0.021, 0.99, 3 << 20, 0.0008])
    metrics = tuple(METRICS[f"weight/weibull_{name}"] for name in FIT)
    writer = RunWriter(path, Header(metrics))
    writer.parameters(parameters)
    for step in (1, 2):
        table = np.array(values).T + np.array([[0.001 * (step - 2)]] + [[0.0]] * 4)
        writer.weights(step, 0.0, {m.name: row for m, row in zip(metrics, table, strict=True)})
    writer.close()
    return load(path)


def test_the_pooled_fit_stands_beside_the_median(tmp_path: Path) -> None:
    run = written(
        tmp_path / "run.h5", {"gate": [1.18, 1.187, 1.188], "q": [1.08, 1.1, 1.12]}, pooled=1.17
    )
    q, gate = by_role(run)
    assert (gate.role, gate.matrices, gate.step) == ("gate", 3, 2)
    assert gate.k == pytest.approx(1.17) and gate.median_k == pytest.approx(1.187)
    assert (
        gate.verdict.word == "at the band's lower edge"
    )  # of the median, though pooled it is below
    assert (gate.below, gate.clearly) == (1, (0,))
    assert np.isnan(q.k) and q.verdict.word == "below the band: mild selection"
    assert by_role(run, 1)[1].median_k == pytest.approx(1.186)


def test_the_error_of_the_median_is_its_spread_over_layers_drawn_again(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    layers, scatter = 25, 0.02
    medians = np.median(random.normal(1.19, scatter, (4000, layers)), axis=1)
    found = [
        by_role(written(tmp_path / f"{i}.h5", {"up": list(random.normal(1.19, scatter, layers))}))[
            0
        ].median_stderr
        for i in range(24)
    ]
    assert np.mean(found) == pytest.approx(medians.std(), rel=0.2)
    one = by_role(written(tmp_path / "one.h5", {"up": [1.19]}))[0]
    assert one.median_stderr == pytest.approx(0.0013)


def test_a_merged_matrix_is_told_beside_its_parts(tmp_path: Path) -> None:
    names = [f"weight/weibull_{name}" for name in FIT]
    writer = RunWriter(tmp_path / "run.h5", Header(tuple(METRICS[name] for name in names)))
    whole = Parameter("0.c_attn.weight", "qkv", 0, 0, (96, 32), 3072)
    parts = [
        Parameter(f"{whole.name}[{r}]", r, 0, 0, (32, 32), 1024, part_of=whole.name) for r in "qkv"
    ]
    writer.parameters([whole, *parts])
    k = np.array([1.1, 1.0, 1.05, 1.2])
    rest = {name: np.full(4, 0.99) for name in names[1:]}
    writer.weights(1, 0.0, {names[0]: k, **rest})
    writer.close()
    found = by_role(load(tmp_path / "run.h5"))
    assert [one.role for one in found] == ["q", "k", "v", "qkv"]
    np.testing.assert_allclose([one.median_k for one in found], [1.0, 1.05, 1.2, 1.1])


def test_neighbours_are_of_the_medians(tmp_path: Path) -> None:
    k = {"q": [1.1352], "k": [1.1462], "v": [1.171], "o": [1.1841], "gate": [1.189], "up": [1.1971]}
    found = neighbours(by_role(written(tmp_path / "run.h5", k)))
    assert found[0].model.name == "Llama 3 8B" and found[0].distance < 1e-6
    assert "Llama 3 8B" in "\n".join(
        lines(load(tmp_path / "run.h5"), by_role(load(tmp_path / "run.h5")))
    )


def test_the_summary_names_the_blocks_below_the_band(tmp_path: Path) -> None:
    k = {"up": [1.19] * 32, "down": [1.0] * 32}
    k["up"][5:8] = [1.0] * 3
    (down,), (up,) = (
        [one.text for one in verdicts(Measured(written(tmp_path / f"{role}.h5", {role: k[role]})))]
        for role in ("down", "up")
    )
    assert "up (1.190, below 1.186 in layers 5–7)" in up and up.endswith("in the band.")
    assert "down (1.000, all 32 below 1.186)" in down and down.endswith("below the band.")
