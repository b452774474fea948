"""Which calls count, and how often; one test per reported case."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dynscope
from tests.live import failures, parameter, reasons, site, train
from tests.models import Decoder, batches, loss_of

pytestmark = pytest.mark.usefixtures("quick_writer")


def test_cc_01_calls_of_one_step_are_pooled(tmp_path: Path) -> None:
    class Repeating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.activation = nn.Linear(4, 4), nn.Tanh()

        def forward(self, x: Tensor) -> Any:
            for i in range(3):
                x = self.activation(self.layer(x)) * (10 - 4 * i)
            return x

    torch.manual_seed(0)
    model, x = Repeating(), torch.randn(3, 4)
    outputs, y = [], x
    for i in range(3):
        outputs.append(model.layer(y).detach().double().numpy())
        y = model.activation(model.layer(y)) * (10 - 4 * i)
    run = train(model, tmp_path / "run.h5", [x])
    pooled = np.concatenate(outputs)
    assert site(run, "activation/n_calls", "layer") == 3
    assert site(run, "activation_gradient/n_calls", "layer") == 3
    assert math.isclose(site(run, "activation/variance", "layer"), pooled.var(), rel_tol=1e-5)
    assert math.isclose(site(run, "activation/absmax", "layer"), abs(pooled).max(), rel_tol=1e-6)


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad.*")
@pytest.mark.parametrize("reentrant", [True, False])
def test_cc_02_recomputation_counts_once(tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    run = train(Checkpointed(), tmp_path / "run.h5", [torch.randn(3, 4)] * 2)
    assert len(run.sites) == 4
    assert (run["activation/n_calls"] == 1).all()
    assert (run["activation_gradient/n_calls"] == 1).all()
    assert not failures(run)


class Parts(nn.Module):
    """A model whose parts are called, never itself, as in a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)

    def training_step(self, x: Tensor) -> Any:
        y = checkpoint(self.encoder, x, use_reentrant=True)
        return self.head(y).square().mean()


def test_cc_02_it_does_where_only_parts_of_the_model_are_called(tmp_path: Path) -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def step(model: Any, x: Tensor) -> Any:
        return model.training_step(x)

    run = train(Parts(), tmp_path / "run.h5", [x] * 2, call=step, loss=lambda loss: loss)
    assert site(run, "activation/n_calls", "encoder.0", row=1) == 1
    assert site(run, "activation_gradient/n_calls", "encoder.0", row=1) == 1
    assert site(run, "activation/n_calls", "head", row=1) == 1


def test_cc_04_05_one_module_under_two_names_and_a_tied_head_count_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.Linear(4, 4)
            self.layers = nn.ModuleList([layer, layer])
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Any:
            y = self.embed(x)
            for layer in self.layers:
                y = layer(y)
            return self.head(y)

    model = Tied()
    run = train(model, tmp_path / "run.h5", [torch.tensor([1, 2, 2])])
    assert [s.path for s in run.sites] == ["embed", "layers.0", "head"]
    assert run.sites[1].aliases == ("layers.1",)
    assert site(run, "activation/n_calls", "layers.0") == 2
    assert [p.name for p in run.parameters] == [n for n, _ in model.named_parameters()]
    total = math.sqrt(float((run["gradient/norm"].values[0].astype(float) ** 2).sum()))
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    assert math.isclose(total, torch.cat(gradients).norm(), rel_tol=1e-5)


def test_cc_07_09_11_only_training_passes_count(tmp_path: Path) -> None:
    """Roll-outs, evaluation and sampling between and around the passes that are trained on."""

    def run_with(extra: bool, name: str) -> dynscope.Run:
        torch.manual_seed(0)
        model = Decoder(layers=1, dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = tmp_path / name
        with dynscope.attach(model, path, optimizer=optimizer, every=1, summary=False) as scope:
            for step, (tokens, other) in enumerate(batches(3, 2)):
                optimizer.zero_grad()
                if extra:
                    with torch.no_grad():
                        for _ in range(4):
                            model(other)
                loss = loss_of(model, tokens) + loss_of(model, other)
                if extra:  # a teacher pass between forward and backward
                    with torch.no_grad():
                        model(other)
                loss.backward()
                optimizer.step()
                scope.log(loss=float(loss.detach()))
                if extra and step == 1:
                    model.eval()
                    with torch.inference_mode():
                        for _ in range(20):
                            model(other[:1, :1])
                    model.train()
        return dynscope.load(path)

    plain, busy = run_with(False, "plain.h5"), run_with(True, "busy.h5")
    assert (plain["activation/n_calls"] == 2).all()
    for metric in plain.metrics:
        if metric.axes[0] == "step":
            a, b = plain[metric.name].values, busy[metric.name].values
            assert np.array_equal(a, b, equal_nan=True), metric.name
    assert plain.scalars("loss").equals(busy.scalars("loss"))


class Student(nn.Module):
    """A network that is its own teacher, beside a frozen part; both under no_grad in its forward."""

    def __init__(self, *, teacher_first: bool, checkpointed: bool = False) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.teacher_first, self.checkpointed = teacher_first, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        def teach() -> Tensor:
            with torch.no_grad():
                out: Tensor = self.net(50 * y)
            return out

        with torch.no_grad():
            y = self.frozen(x)
        target = teach() if self.teacher_first else None
        y = y.requires_grad_()
        mine: Tensor = (
            checkpoint(self.net, y, use_reentrant=True) if self.checkpointed else self.net(y)
        )
        return (mine - (teach() if target is None else target)).square().mean()


@pytest.mark.parametrize("teacher_first", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_cc_07_a_network_that_is_its_own_teacher_counts_as_student(
    tmp_path: Path, teacher_first: bool, checkpointed: bool
) -> None:
    torch.manual_seed(0)
    model, x = Student(teacher_first=teacher_first, checkpointed=checkpointed), torch.randn(3, 4)
    wanted = model.net[0](model.frozen(x)).detach().double()
    own = dynscope.SiteMetric("activation/mine", lambda x: x.mean(), merge="sum")
    run = train(model, tmp_path / "run.h5", [x] * 2, loss=lambda y: y, metrics=["standard", own])
    assert (run["activation/n_calls"] == 1).all() and not failures(run)
    assert site(run, "activation/n_calls", "frozen") == 1
    assert math.isclose(
        site(run, "activation/variance", "net.0"), wanted.var(correction=0), rel_tol=1e-5
    )
    assert math.isclose(site(run, "activation/mine", "net.0"), wanted.mean(), rel_tol=1e-4)
    assert site(run, "activation_gradient/n_calls", "net.0") == 1


def test_cc_07_passes_in_grad_mode_that_nothing_is_trained_on_are_told(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))

    def careless(model: nn.Module, x: Tensor) -> Tensor:
        model(x)  # an evaluation that forgot no_grad
        out: Tensor = model(x)
        return out

    run = train(model, tmp_path / "run.h5", [torch.randn(3, 4)], call=careless)
    assert site(run, "activation/n_calls", "0") == 2
    assert "got no gradient" in reasons(run, "0")


class Cache:
    """Not to be walked: whatever is asked of it is an error."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} of a cache was asked for")

    def __iter__(self) -> Any:
        raise RuntimeError("a cache was walked")


def test_cc_11_caches_are_never_walked(tmp_path: Path) -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Tensor, cache: Any) -> Any:
            return {"cache": cache, "y": self.layers[0](x)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Caching(), Caching()])

        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = block(x, cache=Cache())["y"]
            return x

    path = tmp_path / "run.h5"
    run = train(Model(), path, [torch.randn(3, 4)], sites=r"blocks\.\d")
    assert not failures(run)
    assert site(run, "activation/n_calls", "blocks.1") == 1
    assert parameter(run, "gradient/norm", "blocks.0.layers.0.weight") > 0
