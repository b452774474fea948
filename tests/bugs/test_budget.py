"""What recording costs is measured, and kept within a budget where one is given."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynscope
from dynscope.errors import InputError
from dynscope.hooks.training import weights
from dynscope.hooks.training.cost import Cost
from tests.live import failures

pytestmark = pytest.mark.usefixtures("quick_writer")
OPTIONS: dict[str, Any] = {"every": 1, "sites": "leaves", "summary": False}
SLOW, STEP = 0.02, 0.01  # seconds of a slow statistic, and of a training step


class Clock:
    """Time passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def record(
    path: Path, clock: Clock, seconds: float, takes: float = SLOW, **options: Any
) -> dynscope.Run:
    """Train for so long, with a statistic that ``takes`` its time."""

    def slow(x: Tensor) -> Tensor:
        clock.now += takes
        return x.mean()

    own = dynscope.SiteMetric("activation/slow", slow)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dynscope.attach(
        model, path, optimizer=optimizer, metrics=["standard", own], **OPTIONS | options
    ):
        while clock.now < seconds:
            clock.now += STEP
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dynscope.load(path)


def test_the_cost_of_a_slow_statistic_is_in_the_row(tmp_path: Path, clock: Clock) -> None:
    run = record(tmp_path / "run.h5", clock, 0.5)
    np.testing.assert_allclose(run["clock/cost"], SLOW)
    assert not failures(run)


@pytest.mark.parametrize("every", [1, lambda step: step % 2 == 1])
def test_a_budget_of_two_percent_is_held_by_recording_less_often(
    tmp_path: Path, clock: Clock, every: Any
) -> None:
    seconds = 10.0
    run = record(tmp_path / "run.h5", clock, seconds, budget=0.02, every=every)
    assert float(run["clock/cost"].sum()) <= 0.02 * seconds
    assert 9 <= len(run.steps) <= 10  # as often as the budget allows
    (told, *_) = [event.message for event in run.events if event.kind == "budget"]
    assert "to stay within 2%" in told and run.metadata.settings["budget"] == 0.02


def test_without_need_a_budget_changes_nothing(tmp_path: Path, clock: Clock) -> None:
    run = record(tmp_path / "run.h5", clock, 0.5, takes=1e-4, budget=0.02)
    assert run.steps.tolist() == list(range(1, int(run.steps[-1]) + 1))
    assert not [event for event in run.events if event.kind == "budget"]


@pytest.mark.parametrize("takes", [1e-5, SLOW])
def test_the_weights_keep_to_the_budget_too_and_leave_half_of_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, takes: float
) -> None:
    weigh = weights.collect

    def slow(parameters: Any) -> Any:
        clock.now += SLOW
        return weigh(parameters)

    monkeypatch.setattr(weights, "collect", slow)
    seconds = 10.0
    run = record(tmp_path / "run.h5", clock, seconds, takes, budget=0.02, every=1, weights_every=1)
    weighed = len(run.weight_steps)
    spent = takes * len(run.steps) + SLOW * (weighed - 2)  # but those at the start and the end
    assert 0.75 * 0.02 * seconds <= spent <= 0.02 * seconds
    assert 5 <= weighed <= 12 and len(run.steps) >= 4
    told = [event.message for event in run.events if event.kind == "budget"]
    assert sum("measuring the weights costs 20.0 ms" in each for each in told) == 1
    assert not failures(run)


def test_without_a_budget_the_weights_are_measured_when_they_are_due(
    tmp_path: Path, clock: Clock
) -> None:
    run = record(tmp_path / "run.h5", clock, 0.105, weights_every=3)
    assert run.weight_steps.tolist() == [0, 1, 3, 4]


def test_recording_comes_back_when_it_is_cheap_again(clock: Clock) -> None:
    cost = Cost(0.5)
    assert cost.affordable()
    cost.take(10.0)
    assert not cost.affordable() and not cost.affordable()
    clock.now += 100.0
    assert cost.affordable()
    assert "2 that were due were left out" in cost.stretched()
    cost.take(0.0)
    assert cost.affordable() and cost.stretched() == "recording is within its budget again"


def test_nested_work_counts_once(clock: Clock) -> None:
    cost = Cost(None)
    with cost.timed(), cost.timed():
        clock.now += 0.02
    assert cost.take(0.0) == pytest.approx(0.02)
    assert cost.take(0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("budget", [0.0, -1, 2, 20])
def test_a_budget_that_is_no_share_is_refused(tmp_path: Path, budget: float) -> None:
    with pytest.raises(InputError, match="give a share of the time"):
        dynscope.attach(nn.Linear(2, 2), tmp_path / "run.h5", budget=budget)
    assert not list(tmp_path.iterdir())
