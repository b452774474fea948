"""What a step is, while training; one test per reported case."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynscope
from dynscope.errors import InputError
from tests.live import failures, parameter, site

pytestmark = pytest.mark.usefixtures("quick_writer")
OPTIONS: dict[str, Any] = {"every": 1, "sites": "leaves", "summary": False}


def test_st_01_accumulation_makes_one_record_of_all_micro_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    outputs: list[Any] = []
    norms = []
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for _ in range(2):
            optimizer.zero_grad()
            outputs.clear()
            for scale in (1, 2, 3, 4):
                y = model(scale * torch.randn(3, 4))
                outputs.append(y.detach().double().numpy())
                y.square().mean().backward()
            assert model.weight.grad is not None
            norms.append(float(model.weight.grad.double().norm()))
            optimizer.step()
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2]
    assert (run["activation/n_calls"] == 4).all()
    pooled = np.concatenate(outputs)
    assert math.isclose(site(run, "activation/variance", "", 1), pooled.var(), rel_tol=1e-5)
    for row, norm in enumerate(norms):
        got = parameter(run, "gradient/norm", "weight", row)
        assert math.isclose(got, norm, rel_tol=1e-5)


def test_st_03_a_resumed_training_goes_on_where_it_was(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    for options in ({}, {"resume": True}, {"resume": True, "start_step": 4}):
        with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS, **options) as scope:
            for _ in range(3):
                model(torch.randn(3, 4)).square().mean().backward()
                scope.log(loss=scope.steps, tokens=10)
                optimizer.step()
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert run["clock/tokens"].values.tolist() == [10, 20, 30, 40, 50, 60, 70]
    assert run.scalars("loss").values.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert run.segments == 3
    assert np.isfinite(run["gradient/norm"]).all()


@pytest.mark.parametrize("step", [np.int64(5), torch.tensor(5), 5])
def test_st_05_steps_of_any_integer_type_far_away_and_repeated(tmp_path: Path, step: Any) -> None:
    model = nn.Linear(4, 4)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, **OPTIONS) as scope:
        for given in (step, 2**40, step):
            model(torch.randn(3, 4)).square().mean().backward()
            scope.step(step=given)
            scope.log(loss=1.0)
    run = dynscope.load(path)
    assert run.steps.tolist() == [5, 2**40]
    assert run.scalars("loss")["step"].values.tolist() == [5, 2**40]
    assert not failures(run)


def test_st_03_a_cell_that_is_run_again_closes_its_first_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"

    def cell(steps: int) -> tuple[nn.Module, dynscope.Recorder]:
        model = nn.Sequential(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scope = dynscope.attach(model, path, optimizer=optimizer, **OPTIONS)
        for _ in range(steps):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
        return model, scope

    (first, old), (_, new) = cell(3), cell(2)
    assert old.closed and not new.closed
    assert not any(module._forward_hooks for module in first.modules())
    new.close()
    run = dynscope.load(path)
    assert run.segments == 2 and run["clock/segment"].values.tolist() == [1, 1, 0]
    with pytest.raises(InputError, match="resume=True to continue it or overwrite=True"):
        cell(1)  # nobody records to it any more: an existing file like any other


def test_st_06_passes_before_the_first_step_leave_no_record(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                model(torch.randn(3, 4))
        model.train()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    run = dynscope.load(path)
    assert run.steps.tolist() == [1]
    assert site(run, "activation/n_calls", "") == 1


def test_st_08_steps_without_a_forward_have_missing_values(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, **OPTIONS) as scope:
        scope.step()
        model(torch.randn(3, 4)).square().mean().backward()
        scope.step()
        scope.step()
        model(torch.randn(3, 4)).square().mean().backward()  # a step that never ends
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 3]
    for name in ("activation/variance", "activation_gradient/norm", "gradient/norm"):
        present = np.isfinite(run[name].values).any(axis=1)
        assert present.tolist() == [False, True, False], name


@pytest.mark.parametrize("give", ["step", "log before", "log after"])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_every_row_carries_the_tokens_up_to_and_with_its_step(
    tmp_path: Path, give: str, with_optimizer: bool
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(
        model, path, optimizer=optimizer if with_optimizer else None, **OPTIONS | {"every": 2}
    ) as scope:
        for step in range(1, 7):
            model(torch.randn(3, 4)).square().mean().backward()
            if give == "log before":
                scope.log(tokens=10 * step, loss=step)
            optimizer.step()
            if give == "step":
                scope.log(loss=step)
                scope.step(tokens=10 * step)
            elif not with_optimizer:
                scope.step()
            if give == "log after":
                scope.log(tokens=10 * step, loss=step)
            with torch.no_grad():
                model(torch.randn(3, 4))
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 4, 6]
    assert run.scalars("loss")["step"].values.tolist() == [1, 2, 3, 4, 5, 6]
    assert run.scalars("loss").values.tolist() == [1, 2, 3, 4, 5, 6]
    late = give == "log after" and not with_optimizer  # the row left with scope.step
    wanted = [-1, 10, 60, 150] if late else [10, 30, 100, 210]
    assert run["clock/tokens"].values.tolist() == wanted


def test_tokens_are_right_where_the_model_itself_is_never_called(tmp_path: Path) -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def loss(self, x: Tensor) -> Any:
            return self.layer(x).square().mean()

    model = Called()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS | {"every": 3}) as scope:
        for step in range(1, 7):
            loss = model.loss(torch.randn(3, 4))
            loss.backward()
            scope.log(loss=step, tokens=1)
            optimizer.step()
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 3, 6]
    assert run["clock/tokens"].values.tolist() == [1, 3, 6]
    assert run.scalars("loss")["step"].values.tolist() == [1, 2, 3, 4, 5, 6]


def test_steps_without_an_optimizer_have_updates_from_the_first_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    path = tmp_path / "run.h5"
    moved = []
    with dynscope.attach(model, path, **OPTIONS) as scope:
        for step in range(1, 4):
            model(torch.randn(3, 4)).square().mean().backward()
            with torch.no_grad():
                model.weight.add_(step)
            moved.append(4.0 * step)
            scope.step()
    run = dynscope.load(path)
    got = [parameter(run, "update/norm", "weight", row) for row in range(3)]
    assert np.allclose(got, moved, rtol=1e-5)
