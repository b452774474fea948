"""torch.compile, torch.func, export and inference mode; one test per reported case."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import dynscope
from tests.live import failures, parameter, reasons, site
from tests.models import Decoder, batches, loss_of

pytestmark = pytest.mark.usefixtures("quick_writer")
OPTIONS: dict[str, Any] = {"every": 1, "summary": False}


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> None:
    for step in batches(count, seed=seed):
        optimizer.zero_grad()
        loss_of(model, step[0]).backward()
        optimizer.step()


def in_place(model: nn.Module) -> Any:
    model.compile(backend="aot_eager")
    return model


def wrapped(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [in_place, wrapped])
def test_co_01_04_06_recording_starts_after_the_first_compiled_call_with_plain_names(
    tmp_path: Path, make: Any
) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Decoder(layers=2, dropout=0.0)
    running = make(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(running, optimizer, 1)
    path = tmp_path / "run.h5"
    with dynscope.attach(running, path, optimizer=optimizer, **OPTIONS) as scope:
        for i in range(3):
            steps(running, optimizer, 1, seed=i)
            scope.log(loss=1.0, tokens=5)
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 3]
    assert (run["activation/n_calls"] == 1).all() and len(run.sites) == 7
    assert (run["activation_gradient/n_calls"] == 1).all()
    assert [s.path for s in run.sites][:2] == ["embed", "blocks.0"]
    assert [p.name for p in run.parameters] == [n for n, _ in model.named_parameters()]
    assert run["clock/tokens"].values.tolist() == [5, 10, 15]
    assert not failures(run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_co_03_fullgraph_records(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = Decoder(layers=1, dropout=0.0)
    running: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(running, path, optimizer=optimizer, **OPTIONS):
        steps(running, optimizer, 2)
        with torch.no_grad():
            running(batches(1)[0][0])
    run = dynscope.load(path)
    assert (run["activation/n_calls"] == 1).all() and (run["activation/variance"] > 0).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_exported_model_does_not_hold_the_recorder(tmp_path: Path) -> None:
    model = Decoder(layers=1, dropout=0.0)
    with dynscope.attach(model, tmp_path / "run.h5", **OPTIONS):
        exported = torch.export.export(model, (batches(1)[0][0],))
    assert "dynscope" not in str(exported.graph)
    torch.export.save(exported, io.BytesIO())


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_co_09_functional_transforms_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = functional_call(model, parameters, (x,))
        return y.square().mean()

    def transforms() -> list[Tensor]:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        tangent: Any = torch.func.jvp(lambda x: model(x), (x,), (torch.ones_like(x),))[1]
        per_sample = vmap(grad(loss), (None, 0))(parameters, x)
        hessian = torch.func.hessian(lambda x: loss(parameters, x))(x[0])
        return [tangent, per_sample["0.weight"], hessian, vmap(model)(x)]

    plain = transforms()
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, sites="leaves", **OPTIONS):
        attached = transforms()
        model(x).square().mean().backward()
        transforms()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain, attached, strict=True))
    run = dynscope.load(path)
    assert not failures(run)
    assert site(run, "activation/n_calls", "0") == 1
    assert not reasons(run, "0")


def test_co_11_evaluation_in_inference_mode_does_not_disturb(tmp_path: Path) -> None:
    """Between steps, around a whole step's bookkeeping, and inside a training forward."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            with torch.inference_mode():
                for block in self.blocks:
                    x = block(x)
            return self.head(x.clone())

    model = Frozen()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, sites=r"blocks\.\d|head", **OPTIONS) as scope:
        for _ in range(3):
            with torch.inference_mode():
                model(torch.randn(3, 4))
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            with torch.inference_mode():
                scope.step(tokens=3)
                scope.log(loss=torch.ones(()))
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 3]
    assert (run["activation/n_calls"] == 1).all()
    assert parameter(run, "gradient/norm", "head.weight", 2) > 0
    assert parameter(run, "update/norm", "head.weight", 2) > 0
    assert not failures(run)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_fake_and_meta_tensors_are_left_alone(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Linear(4, 4)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, sites="leaves", **OPTIONS) as scope:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.randn(3, 4)).sum()
        torch.jit.trace(model, torch.randn(3, 4))
        model(torch.randn(3, 4)).sum().backward()
        scope.step()
    run = dynscope.load(path)
    assert not failures(run)
    assert np.isfinite(site(run, "activation/variance", ""))
