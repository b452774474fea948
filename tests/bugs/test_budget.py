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
from dynscope.hooks.cost import Cost
from tests.live import failures

OPTIONS: dict[str, Any] = {"every": 1, "sites": "leaves", "summary": False}
SLOW = 0.01


def slow(x: Tensor) -> Tensor:
    time.sleep(SLOW)
    return x.mean()


def record(path: Path, seconds: float, **options: Any) -> dynscope.Run:
    """Train steps of about 10 ms for so long."""
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    end = time.perf_counter() + seconds
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS | options):
        while time.perf_counter() < end:
            time.sleep(0.01)
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dynscope.load(path)


def test_the_cost_of_a_slow_statistic_is_in_the_row(tmp_path: Path) -> None:
    own = dynscope.SiteMetric("activation/slow", slow)
    run = record(tmp_path / "run.h5", 0.5, metrics=["standard", own])
    assert float(np.median(run["clock/cost"])) > SLOW
    assert not failures(run)


@pytest.mark.parametrize("every", [1, lambda step: step % 2 == 1])
def test_a_budget_of_two_percent_is_held_by_recording_less_often(
    tmp_path: Path, every: Any
) -> None:
    own = dynscope.SiteMetric("activation/slow", slow)
    seconds = 5.0
    run = record(tmp_path / "run.h5", seconds, metrics=["standard", own], budget=0.02, every=every)
    share = float(run["clock/cost"].sum()) / seconds
    assert 0.0 < share <= 0.02 + SLOW * 2 / seconds
    assert 2 <= len(run.steps) <= 12
    (told, *_) = [event.message for event in run.events if event.kind == "budget"]
    assert "to stay within 2%" in told and run.metadata.settings["budget"] == 0.02


def test_without_need_a_budget_changes_nothing(tmp_path: Path) -> None:
    run = record(tmp_path / "run.h5", 0.5, budget=1.0)
    assert run.steps.tolist() == list(range(1, int(run.steps[-1]) + 1))
    assert not [event for event in run.events if event.kind == "budget"]


def test_recording_comes_back_when_it_is_cheap_again() -> None:
    cost = Cost(0.5)
    assert cost.affordable()
    cost.take(10.0)
    assert not cost.affordable() and not cost.affordable()
    cost._since -= 100.0
    assert cost.affordable()
    assert "2 that were due were left out" in cost.stretched()
    cost.take(0.0)
    assert cost.affordable() and cost.stretched() == "recording is within its budget again"


def test_nested_work_counts_once() -> None:
    cost = Cost(None)
    with cost.timed(), cost.timed():
        time.sleep(0.02)
    assert 0.02 <= cost.take(0.0) < 0.04
    assert cost.take(0.5) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("budget", [0.0, -1, 2, 20])
def test_a_budget_that_is_no_share_is_refused(tmp_path: Path, budget: float) -> None:
    with pytest.raises(InputError, match="give a share of the time"):
        dynscope.attach(nn.Linear(2, 2), tmp_path / "run.h5", budget=budget)
    assert not list(tmp_path.iterdir())
