"""A recording's life beside a training's; one test per reported case."""

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynscope
from dynscope.errors import InputError
from tests.live import failures, parameter, reasons, site, squares

pytestmark = pytest.mark.usefixtures("quick_writer")
OPTIONS: dict[str, Any] = {"every": 1, "sites": "leaves", "summary": False}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    squares(model(x)).backward()
    optimizer.step()


def test_lc_01_a_module_put_in_place_of_another_is_followed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    gone, x = model[1][0], torch.randn(3, 4)  # type: ignore[index]
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, **OPTIONS) as scope:
        for i in range(4):
            if i == 2:
                model[1] = nn.Sequential(nn.Linear(4, 4))
            model.zero_grad()
            y = model[0](x).detach()
            squares(model(x)).backward()
            scope.step()
    run = dynscope.load(path)
    assert not gone._forward_hooks
    wanted = model[1](y).detach().double().numpy().var()
    assert np.isclose(site(run, "activation/variance", "1.0", 3), wanted, rtol=1e-5)
    gradient = model[1][0].weight.grad  # type: ignore[index]
    assert np.isclose(parameter(run, "gradient/norm", "1.0.weight", 3), gradient.norm(), rtol=1e-5)
    assert np.isnan(site(run, "activation/variance", "1.1", 3))
    assert np.isnan(parameter(run, "gradient/norm", "1.1.weight", 3))
    assert any(e.kind == "replaced" and e.message.startswith("1:") for e in run.events)
    assert not failures(run)


def test_lc_02_rows_are_there_whatever_ends_the_loop(tmp_path: Path) -> None:
    for i, ending in enumerate((RuntimeError, KeyboardInterrupt, SystemExit)):
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        path = tmp_path / f"{i}.h5"
        with (
            pytest.raises(ending),
            dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) as scope,
        ):
            for n in range(1, 11):
                step(model, optimizer, torch.randn(3, 4))
                scope.log(loss=n)
                if n == 6:
                    raise ending
        run = dynscope.load(path)
        assert run.steps.tolist() == [1, 2, 3, 4, 5, 6] and run.metadata.closed
        assert run.scalars("loss").values.tolist() == [1, 2, 3, 4, 5, 6]
        assert not model._forward_hooks


@pytest.mark.parametrize(
    "end",
    ["", *(pytest.param(e, marks=pytest.mark.slow) for e in ("raise OSError", "sys.exit(3)"))],
)
def test_lc_02_a_script_that_never_closes_loses_no_row(tmp_path: Path, end: str) -> None:
    path = tmp_path / "run.h5"
    code = f"""
        import sys, torch, dynscope
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scope = dynscope.attach(model, {str(path)!r}, optimizer=optimizer, every=1, summary=False)
        for n in range(6):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            scope.log(tokens=1)
        {end}
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        check=False, capture_output=True, text=True, env=os.environ | {"DYNSCOPE_FUSED": "0"},
    )  # fmt: skip
    assert "dynscope" not in done.stderr.replace("import sys, torch, dynscope", ""), done.stderr
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 3, 4, 5, 6] and run.metadata.closed
    assert run["clock/tokens"].values.tolist() == [1, 2, 3, 4, 5, 6]


def test_lc_04_forked_workers_and_children_record_nothing_and_hang_nowhere(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    data = torch.utils.data.TensorDataset(torch.randn(12, 4))
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) as scope:
        for _ in range(3):
            loader: Any = torch.utils.data.DataLoader(
                data, 4, num_workers=2, multiprocessing_context="fork"
            )
            for (x,) in loader:
                step(model, optimizer, x)
        child = os.fork()
        if child == 0:  # a worker that trains the model too, as in Hogwild
            step(model, optimizer, torch.randn(3, 4))
            scope.log(loss=1.0)
            scope.step(tokens=5)
            scope.close()
            os._exit(0 if scope.steps == 9 else 1)
        assert os.waitpid(child, 0)[1] == 0
        step(model, optimizer, torch.randn(3, 4))
    run = dynscope.load(path)
    assert run.steps.tolist() == list(range(1, 11)) and not run.scalar_names
    assert (run["activation/n_calls"] == 1).all()


def test_lc_05_the_dtype_may_change_after_attaching(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    optimizer = sgd(model)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        step(model, optimizer, x)
        model.double()
        for _ in range(2):
            step(model, optimizer, x.double())
    run = dynscope.load(path)
    assert np.isfinite(run["gradient/norm"]).all() and np.isfinite(run["update/norm"]).all()
    assert np.isfinite(run["activation/variance"]).all()
    told = [event.message for event in run.events if event.kind == "dtype"]
    assert told == ["0 and 1 more: float64 outputs, float32 before"]


def test_a_closed_recorder_takes_everything_and_does_nothing(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    path = tmp_path / "run.h5"
    scope = dynscope.attach(model, path, optimizer=optimizer, **OPTIONS)
    step(model, optimizer, torch.randn(3, 4))
    scope.close()
    for _ in range(2):
        scope.log(loss=1.0, tokens=3)
        scope.step(tokens=1)
        scope.before_clip()
        step(model, optimizer, torch.randn(3, 4))
        scope.close()
    with scope:
        pass
    assert scope.steps == 1
    assert dynscope.load(path).steps.tolist() == [1]


def test_scalars_that_are_no_numbers_are_left_out_and_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    path = tmp_path / "run.h5"
    names: dict[str, Any] = {
        "a/b": 1.0,
        "": 2.0,
        "50%{y}": 3.0,
        "Größe ∑": 4.0,
        "self": 5.0,
        "values": 6.0,
    }
    values: dict[str, Any] = {
        "loss": torch.ones((), requires_grad=True).bfloat16(), "numpy": np.float32(2),
        "text": "no", "none": None, "many": torch.ones(3),
    }  # fmt: skip
    with dynscope.attach(model, path, **OPTIONS) as scope:
        scope.log(**values, **names)
        scope.step()
    run = dynscope.load(path)
    assert set(run.scalar_names) == {"loss", "numpy", *names}
    assert {name: float(run.scalars(name)[0]) for name in names} == names
    assert len(failures(run)) == 3


def test_weird_names_of_modules_are_kept(tmp_path: Path) -> None:
    names = ["a/b", "50%{y}", "layer 1", "größe", "x" * 300]
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(4, 4))
    own = dynscope.SiteMetric("activation/own", lambda x: x.abs().max(), merge="max")
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, metrics=["light", own], **OPTIONS) as scope:
        squares(model(torch.randn(3, 4))).backward()
        scope.step()
    run = dynscope.load(path)
    assert [s.path for s in run.sites] == names
    assert [p.name for p in run.parameters] == [n for n, _ in model.named_parameters()]
    assert np.allclose(run["activation/own"], run["activation/absmax"])
    assert not failures(run)


def test_schedules_and_metrics_of_the_users_that_raise_are_told_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    def every(step: int) -> bool:
        if step == 3:
            raise ZeroDivisionError("three")
        return True

    def only_wide(x: Tensor) -> Tensor:
        if x.shape[-1] == 4:
            raise ValueError("too narrow")
        return x.abs().max()

    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), torch.randn(3, 4)
    optimizer = sgd(model)
    own = [
        dynscope.SiteMetric("activation/wide", only_wide, merge="max"),
        dynscope.SiteMetric("activation/vector", lambda x: x),
        dynscope.SiteMetric("gradient/wide", lambda g: only_wide(g), merge="max"),
    ]
    path = tmp_path / "run.h5"
    with dynscope.attach(
        model, path, optimizer=optimizer, metrics=["standard", *own],
        **OPTIONS | {"every": every, "weights_every": every},
    ):  # fmt: skip
        for _ in range(5):
            step(model, optimizer, x)
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 4, 5]
    assert run.weight_steps.tolist() == [0, 1, 2, 4, 5]
    assert np.isfinite(run["activation/variance"]).all() and np.isfinite(run["gradient/norm"]).all()
    assert np.array_equal(
        run["activation/wide"].values[:, 0], run["activation/absmax"].values[:, 0]
    )
    assert np.isnan(run["activation/wide"].values[:, 1]).all()
    assert np.isnan(run["activation/vector"].values).all()
    assert "too narrow" in reasons(run, "1") and "activation/wide" in reasons(run, "1")
    assert parameter(run, "gradient/wide", "1.weight") > 0
    assert np.isnan(parameter(run, "gradient/wide", "0.weight"))
    assert sum("three" in message for message in failures(run)) == 2


def test_a_batch_that_fails_in_the_middle_of_a_step_does_not_end_the_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = sgd(model)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for i in range(4):
            optimizer.zero_grad()
            if i == 1:
                with pytest.raises(RuntimeError):  # out of memory, say
                    model(torch.randn(3, 5))
                with torch.no_grad():  # not taken for a part of the forward that failed
                    model[0](torch.full((3, 4), 1e6))
            step(model, optimizer, torch.randn(3, 4))
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 3, 4]
    assert (run["activation/n_calls"] == 1).all()
    assert (run["activation/absmax"] < 1e5).all()


def test_arguments_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    path = tmp_path / "run.h5"
    wrong: list[dict[str, Any]] = [
        {"optimizer": [optimizer, optimizer]},
        {"optimizer": model.parameters()},
        {"optimizer": optimizer, "scaler": optimizer},
    ]
    for arguments in wrong:
        with pytest.raises(InputError):
            dynscope.attach(model, path, **OPTIONS, **arguments)
    with pytest.raises(InputError):
        dynscope.attach(lambda x: x, path, **OPTIONS)  # type: ignore[arg-type]
    assert not path.exists() and not model._forward_hooks


def test_several_optimizers_step_a_model_with_one_recorder(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = (torch.optim.Adam(m.parameters(), lr=0.1) for m in model)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=first, **OPTIONS):
        for _ in range(2):
            squares(model(torch.randn(3, 4))).backward()
            second.step()
            first.step()
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2]
    assert parameter(run, "update/norm", "0.weight") > 0
    assert np.isnan(parameter(run, "update/norm", "1.weight"))
    assert parameter(run, "gradient/norm", "1.weight") > 0
    assert "does not hold it" in reasons(run, "1.weight")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_gr_12_a_step_of_several_optimizers_is_over_when_each_has_stepped(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    layers = (model[0], model[1])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1 * (i + 1)) for i, m in enumerate(layers)]
    path, wanted = tmp_path / "run.h5", []
    with dynscope.attach(model, path, optimizer=optimizers, **OPTIONS) as scope:
        for _ in range(3):
            squares(model(torch.randn(3, 4))).backward()
            wanted.append([float(m.weight.grad.norm()) for m in layers])  # type: ignore
            for i in order:
                optimizers[i].step()
                optimizers[i].zero_grad()
    assert scope.steps == 3
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 3] and (run["activation/n_calls"] == 1).all()
    for i in range(2):
        for row in range(3):
            assert parameter(run, "gradient/norm", f"{i}.weight", row) == pytest.approx(
                wanted[row][i]
            )
            update = parameter(run, "update/norm", f"{i}.weight", row)
            assert update == pytest.approx(0.1 * (i + 1) * wanted[row][i], rel=1e-4)
    assert run["optimizer/lr"].values[0].tolist() == pytest.approx([0.1, 0.2])
    assert [p.group for p in run.parameters] == [0, 0, 1, 1, -1, -1]


def test_gr_12_an_optimizer_that_never_steps_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    used, unused = (torch.optim.SGD(m.parameters(), lr=0.1) for m in model)
    with dynscope.attach(model, tmp_path / "run.h5", optimizer=[used, unused], **OPTIONS) as scope:
        for _ in range(40):
            step(model, used, torch.randn(3, 4))
    assert scope.steps == 9  # the first of 32, then one each


class OddSettings(torch.optim.SGD):
    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, lr=torch.tensor(0.25))
        self.param_groups[0] |= {"betas": (0.9,), "eps": (1e-30, 1e-3)}


def test_settings_of_any_optimizer_are_read_where_they_are_numbers(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = OddSettings(model.parameters())
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        step(model, optimizer, torch.randn(3, 4))
    run = dynscope.load(path)
    assert run["optimizer/lr"].values.tolist() == [[0.25]]
    assert np.isnan(run["optimizer/eps"].values).all() and not failures(run)
    assert parameter(run, "gradient/norm", "weight") > 0


def test_double_backward_is_no_trouble(tmp_path: Path) -> None:
    results = []
    for path in (None, tmp_path / "run.h5"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = sgd(model)
        scope = dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) if path else None
        for _ in range(2):
            x = torch.randn(3, 4, requires_grad=True)
            optimizer.zero_grad()
            (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (g.norm() - 1).square().backward()
            optimizer.step()
        if scope:
            scope.close()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)
    run = dynscope.load(tmp_path / "run.h5")
    assert run.steps.tolist() == [1, 2] and not failures(run)


def test_threads_that_train_side_by_side_have_their_own_right_numbers(tmp_path: Path) -> None:
    """Each thread its model; one of them is evaluated by a further thread all the time."""
    models = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2)]
    x, done = torch.randn(700, 64), threading.Event()

    def train(i: int) -> None:
        optimizer = torch.optim.SGD(models[i].parameters(), lr=0.0)
        path = tmp_path / f"{i}.h5"
        with dynscope.attach(models[i], path, optimizer=optimizer, **OPTIONS):
            for _ in range(15):
                step(models[i], optimizer, (i + 1) * x)

    def evaluate() -> None:
        with torch.no_grad():
            while not done.is_set():
                models[0](x)

    trainers = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    evaluator = threading.Thread(target=evaluate)
    for thread in (*trainers, evaluator):
        thread.start()
    for thread in trainers:
        thread.join()
    done.set()
    evaluator.join()
    for i in range(2):
        run = dynscope.load(tmp_path / f"{i}.h5")
        assert (run["activation/n_calls"] == 1).all() and len(run.sites) == 2
        wanted = float(models[i]((i + 1) * x).detach().double().var(correction=0))
        assert np.allclose(run["activation/variance"].values[:, 1], wanted, rtol=1e-4)
        assert (run["activation/count"] == 700 * 64).all()


class Nested(torch.optim.SGD):
    """Its step calls its parent's, and once fails in the middle: hooks are called by both."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("not this time")
        return super().step(closure)


def test_a_step_within_a_step_counts_once(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    torch.optim.SGD(model.parameters())  # from now on torch calls the hooks in SGD.step too
    optimizer = Nested(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for i in range(4):
            before = model.weight.detach().clone()
            try:
                step(model, optimizer, torch.randn(3, 4))
            except RuntimeError:
                assert i == 1
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 3]
    moved = float((model.weight.detach() - before).double().norm())
    assert np.isclose(parameter(run, "update/norm", "weight", 2), moved, rtol=1e-4)


def test_groups_and_parameters_that_come_and_go_are_told(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        step(model, optimizer, torch.randn(3, 4))
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.5})
        step(model, optimizer, torch.randn(3, 4))
        model[1].requires_grad_(False)
        step(model, optimizer, torch.randn(3, 4))
    run = dynscope.load(path)
    assert np.isfinite(run["update/norm"].values).tolist() == [
        [False, False, True, True], [True] * 4, [True, True, False, False]
    ]  # fmt: skip
    assert "after attaching" in reasons(run, "group 1")
    assert "no parameter had a gradient" not in reasons(run, "") and not failures(run)


def test_a_metric_may_call_the_model_without_being_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer, x = sgd(model), torch.randn(3, 4)
    own = dynscope.SiteMetric("activation/again", lambda _: model[0](x).mean())
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, metrics=["standard", own], **OPTIONS):
        for _ in range(2):
            step(model, optimizer, x)
    run = dynscope.load(path)
    assert (run["activation/n_calls"] == 1).all() and not failures(run)
    assert np.allclose(run["activation/again"][:, 0], run["activation/mean"][:, 0], rtol=1e-5)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.lora_A = base, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.lora_A(x)
        return out


@pytest.mark.parametrize("adapt", [False, True], ids=["a layer appended", "an adapter put around"])
def test_lc_01_layers_added_later_are_recorded_from_then_on(tmp_path: Path, adapt: bool) -> None:
    torch.manual_seed(0)
    model, path = Growing(), tmp_path / "run.h5"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    added = "blocks.0.lora_A" if adapt else "blocks.2"
    wanted = []
    with dynscope.attach(model, path, optimizer=optimizer, every=1, sites="leaves", summary=False):
        for step in range(4):
            if step == 2:
                if adapt:
                    model.blocks[0] = Adapter(model.blocks[0])
                else:
                    model.blocks.append(nn.Linear(4, 4))
                optimizer.add_param_group({"params": model.get_submodule(added).parameters()})
            model(torch.randn(3, 4)).square().mean().backward()
            if step >= 2:
                gradient = model.get_submodule(added).get_parameter("weight").grad
                assert gradient is not None
                wanted.append(float(gradient.norm()))
            optimizer.step()
            optimizer.zero_grad()
    run = dynscope.load(path)
    gradients = run["gradient/norm"].sel(
        parameter=run["gradient/norm"]["name"] == f"{added}.weight"
    )
    assert np.isnan(gradients.values[:2]).all()
    np.testing.assert_allclose(gradients.values[2:, 0], wanted, rtol=1e-5)
    calls = run["activation/n_calls"]
    here = calls.sel(site=calls["path"] == added).values[:, 0]
    assert np.isnan(here[:2]).all() and (here[2:] == 1).all()
    stays = calls.sel(site=calls["path"] == "blocks.1").values[:, 0]
    assert (stays == 1).all() and not failures(run)
    assert [event.kind for event in run.events].count("replaced") == 1


def test_lc_01_lazy_layers_are_described_once_they_have_a_shape(tmp_path: Path) -> None:
    model, path = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)), tmp_path / "run.h5"
    with dynscope.attach(model, path, every=1, sites="leaves", summary=False) as scope:
        for _ in range(2):
            model(torch.randn(3, 5)).square().mean().backward()
            scope.step()
    run = dynscope.load(path)
    assert [p.shape for p in run.parameters] == [(4, 5), (4,), (2, 4), (2,)]
    assert np.isfinite(run["gradient/norm"]).all() and np.isfinite(run["activation/variance"]).all()
    assert run.weight_steps.tolist()[-1] == 2 and not failures(run)
