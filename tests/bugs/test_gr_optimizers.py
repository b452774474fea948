"""Optimizers that are not one plain `torch.optim` optimizer from beginning to end."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import dynscope
from dynscope.errors import InputError
from tests.live import failures, reasons

pytestmark = pytest.mark.usefixtures("quick_writer")
OPTIONS: dict[str, Any] = {"every": 1, "sites": "leaves", "summary": False}


def norms(model: nn.Module) -> list[float]:
    return [math.nan if p.grad is None else float(p.grad.norm()) for p in model.parameters()]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def backward(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    return loss


class Lookahead:
    """As written by many: no `Optimizer`, but what looks like one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self) -> None:
        self.optimizer.step()
        fast = [p for g in self.param_groups for p in g["params"]]
        with torch.no_grad():
            for slow, p in zip(self.slow, fast, strict=True):
                p.copy_(slow.lerp_(p, 0.5))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class Chained:
    """One for several, each with groups of its own."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.chained = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.chained for group in each.param_groups]

    def step(self) -> None:
        for each in self.chained:
            each.step()

    def zero_grad(self) -> None:
        for each in self.chained:
            each.zero_grad()


class Delegating:
    """Has everything of the optimizer inside, also the registration of hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _accelerated(optimizer: torch.optim.Optimizer) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(optimizer)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _chained(model: nn.Module) -> Any:
    first, _, last = model.children()
    return Chained(_sgd(first), torch.optim.Adam(last.parameters(), lr=0.1))


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "lookahead": lambda model: Lookahead(_sgd(model)),
    "one in the other": lambda model: Lookahead(Delegating(_sgd(model))),  # type: ignore[arg-type]
    "several": _chained,
    "accelerate": lambda model: _accelerated(_sgd(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gr_07_the_optimizer_inside_of_a_wrapper_is_followed(tmp_path: Path, wrapper: str) -> None:
    path, weights = tmp_path / "run.h5", []
    for recorded in (False, True):
        model, wanted = network(), []
        optimizer = WRAPPERS[wrapper](model)
        scope = dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) if recorded else None
        torch.manual_seed(1)
        for _ in range(3):
            backward(model)
            wanted.append(norms(model))
            optimizer.step()
            optimizer.zero_grad()
        if scope is not None:
            scope.close()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 3] and (run["activation/n_calls"] == 1).all()
    np.testing.assert_allclose(run["gradient/norm"], wanted, rtol=1e-5)
    assert (run["update/norm"] > 0).all() and (run["optimizer/lr"] == np.float32(0.1)).all()
    assert any("wraps" in event.message for event in run.events) and not failures(run)


class Alone:
    def __init__(self) -> None:
        self.param_groups: list[Any] = []

    def step(self) -> None: ...


@pytest.mark.parametrize("kind", ["scheduler", "dict", "no optimizer inside"])
def test_gr_07_what_holds_no_optimizer_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    model = network()
    optimizer = _sgd(model)
    given: Any = {
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "dict": {"g": optimizer},
        "no optimizer inside": Alone(),
    }[kind]
    with pytest.raises(InputError, match=type(given).__name__) as error:
        dynscope.attach(model, tmp_path / "run.h5", optimizer=given, **OPTIONS)
    assert "\n" not in str(error.value) and not (tmp_path / "run.h5").exists()


class Clipping(torch.optim.SGD):
    """Changes the gradients in its own step, before its parent's."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1e-2)
        return super().step(closure)


def test_gr_03_an_optimizer_that_clips_by_itself_applies_what_it_clipped(tmp_path: Path) -> None:
    model, before, after = network(), [], []
    optimizer, path = Clipping(model.parameters(), lr=0.1), tmp_path / "run.h5"
    own = dynscope.SiteMetric("gradient/own", lambda g: g.norm(), merge="sum")
    with dynscope.attach(
        model, path, optimizer=optimizer, metrics=["standard", own], **OPTIONS
    ) as scope:
        for _ in range(2):
            backward(model)
            before.append(norms(model))
            optimizer.step()
            after.append(norms(model))
            optimizer.zero_grad()
    run = dynscope.load(path)
    assert scope.steps == 2
    np.testing.assert_allclose(run["gradient/norm"], after, rtol=1e-5)
    np.testing.assert_allclose(run["gradient/own"], after, rtol=1e-5)
    np.testing.assert_allclose(run["gradient/norm_before_clip"], before, rtol=1e-5)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: a step up, another gradient, a step of the base optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def _all(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self._all():
            assert p.grad is not None
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._all():
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


@pytest.mark.parametrize("closure", [False, True])
def test_gr_07_two_steps_of_sharpness_aware_minimization_are_one(
    tmp_path: Path, closure: bool
) -> None:
    model, applied, moved = network(), [], []
    optimizer, path = SAM(model.parameters()), tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) as scope:
        for _ in range(3):
            x, old = torch.randn(3, 4), [p.detach().clone() for p in model.parameters()]
            model(x).square().mean().backward()

            def again(x: Tensor = x) -> None:
                model(x).square().mean().backward()
                applied.append(norms(model))

            if closure:
                optimizer.step(again)
            else:
                optimizer.first_step()
                again()
                optimizer.second_step()
            new = list(model.parameters())
            moved.append([float((b - a).detach().norm()) for a, b in zip(old, new, strict=True)])
            optimizer.zero_grad()
    run = dynscope.load(path)
    assert scope.steps == 3 and run.steps.tolist() == [1, 2, 3]
    np.testing.assert_allclose(run["gradient/norm"], applied, rtol=1e-5)
    np.testing.assert_allclose(run["update/norm"], moved, rtol=1e-4)
    assert not failures(run)
    if not closure:
        assert "cleared before a step" in reasons(run, "")


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def _lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=2)


def _head(model: nn.Module) -> torch.optim.Optimizer:
    first, _, last = model.children()
    first.requires_grad_(False)
    return _sgd(last)


LATER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "another kind": _adam,
    "one with a closure": _lbfgs,
    "one of what is trained still": _head,
}


@pytest.mark.parametrize("later", LATER)
def test_gr_07_an_optimizer_that_takes_the_place_of_another_is_followed(
    tmp_path: Path, later: str
) -> None:
    model, wanted = network(), []
    optimizer, path = _sgd(model), tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) as scope:
        for i in range(6):
            if i == 3:
                optimizer = LATER[later](model)

            def closure() -> Tensor:
                model.zero_grad()
                return backward(model)

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            wanted.append(norms(model))
    run = dynscope.load(path)
    assert scope.steps == 6 and run.steps.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(run["gradient/norm"], wanted, rtol=1e-5)
    told = [event.message for event in run.events if event.kind == "replaced"]
    assert told == [f"SGD steps no more, {type(optimizer).__name__} is followed in its place"]
    assert not failures(run)


def test_gr_07_another_optimizer_of_a_few_parameters_takes_no_place(tmp_path: Path) -> None:
    model = network()
    optimizer, other, path = _sgd(model), _sgd(model[0]), tmp_path / "run.h5"
    before = dict(_global_optimizer_pre_hooks)
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) as scope:
        for _ in range(3):
            backward(model)
            other.step()
            optimizer.step()
            optimizer.zero_grad()
    assert scope.steps == 3
    assert not [e for e in dynscope.load(path).events if e.kind == "replaced"]
    assert dict(_global_optimizer_pre_hooks) == before


def test_gr_03_hooks_on_steps_run_before_ours_whenever_they_were_registered(tmp_path: Path) -> None:
    model, after = network(), []
    optimizer, path = _sgd(model), tmp_path / "run.h5"

    def halve(*_: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= 0.5

    with (
        dynscope.attach(model, path, optimizer=optimizer, **OPTIONS),
        dynscope.attach(model, tmp_path / "other.h5", optimizer=optimizer, **OPTIONS),
    ):
        for _ in range(3):
            hook = optimizer.register_step_pre_hook(halve)
            backward(model)
            optimizer.step()
            after.append(norms(model))
            optimizer.zero_grad()
            hook.remove()
    for run in (dynscope.load(path), dynscope.load(tmp_path / "other.h5")):
        np.testing.assert_allclose(run["gradient/norm"], after, rtol=1e-5)
        assert "run later" not in reasons(run, "")


def test_gr_03_a_hook_that_could_not_be_preceded_is_said(tmp_path: Path) -> None:
    model = network()
    optimizer, path = _sgd(model), tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        backward(model)
        optimizer.register_step_pre_hook(lambda *_: None)
        optimizer.step()
    assert "run later and may change gradients" in reasons(dynscope.load(path), "")


@pytest.mark.parametrize("every", [1, 3])
def test_gr_07_optimizers_inside_of_the_backward_may_lack_a_gradient(
    tmp_path: Path, every: int
) -> None:
    """Of an unused layer, and of one that only some steps use."""
    model = network()
    sometimes = nn.Linear(4, 4)
    model.add_module("unused", nn.Linear(4, 4))
    model.add_module("sometimes", sometimes)
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    seen: dict[Tensor, float] = {}

    def step(p: Tensor) -> None:
        assert p.grad is not None
        seen[p] = float(p.grad.norm())
        own[p].step()  # type: ignore[index]
        own[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    path, wanted = tmp_path / "run.h5", []
    with dynscope.attach(
        model, path, optimizer=list(own.values()), **OPTIONS | {"every": every}
    ) as scope:
        for i in range(6):
            seen.clear()
            x = model[2](model[1](model[0](torch.randn(3, 4))))
            (sometimes(x) if i % 2 else x).square().mean().backward()
            wanted.append([seen.get(p, math.nan) for p in model.parameters()])
    run = dynscope.load(path)
    rows = [step - 1 for step in run.steps]
    assert scope.steps == 6 and rows == (list(range(6)) if every == 1 else [0, 2, 5])
    np.testing.assert_allclose(run["gradient/norm"], np.array(wanted)[rows], rtol=1e-5)
    assert (run["activation/n_calls"][:, 0] == 1).all() and not failures(run)


def test_gr_07_many_optimizers_do_not_look_through_all_parameters_each(tmp_path: Path) -> None:
    def looked_up(count: int) -> int:
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(count)))
        own = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        path = tmp_path / f"{count}.h5"
        with dynscope.attach(model, path, optimizer=own, **OPTIONS | {"sites": "0"}) as scope:
            calls = 0
            look = scope._watch._now

            def counted(i: int) -> Tensor | None:
                nonlocal calls
                calls += 1
                return look(i)

            scope._watch._now = counted  # type: ignore[method-assign]
            model(torch.randn(3, 2)).square().mean().backward()
            for optimizer in own:
                optimizer.step()
        return calls

    assert looked_up(80) < 3 * looked_up(40)


def test_st_05_a_step_number_beside_an_optimizer_is_refused_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    optimizer, path = _sgd(model), tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) as scope:
        for i in range(3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            scope.step(step=i + 1, tokens=8)  # its own number is no surprise
            scope.step(step=torch.tensor(100 + i))  # type: ignore[arg-type]
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 3]
    assert run["clock/tokens"].values.tolist() == [8, 16, 24]
    assert [event.kind for event in run.events].count("step") == 1
    assert caplog.text.count("start_step=") == 1


def test_st_08_a_step_that_raises_leaves_the_next_ones_as_they_are(tmp_path: Path) -> None:
    model, wanted = network(), []
    optimizer, path = _sgd(model), tmp_path / "run.h5"

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) as scope:
        for i in range(5):
            optimizer.zero_grad()
            backward(model)
            if i == 1:  # the gradients are there, the optimizer is not done
                hook = optimizer.register_step_pre_hook(fail)
                with pytest.raises(RuntimeError, match="out of memory"):
                    optimizer.step()
                hook.remove()
                continue
            if i == 3:
                with pytest.raises(ZeroDivisionError):
                    optimizer.step(lambda: 1 / 0)
                continue
            wanted.append(norms(model))
            optimizer.step()
    run = dynscope.load(path)
    assert scope.steps == 3 and run.steps.tolist() == [1, 2, 3]
    np.testing.assert_allclose(run["gradient/norm"], wanted, rtol=1e-5)
    assert (run["activation/n_calls"] == 1).all()


def test_gr_17_states_and_groups_that_come_later_leave_the_hooks_alone(tmp_path: Path) -> None:
    model, wanted = network(), []
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1, foreach=True)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) as scope:
        for i in range(4):
            backward(model)
            wanted.append(norms(model))
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(i % 2))
            model[2].zero_grad()
            if i == 0:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if i == 1:
                optimizer.add_param_group({"params": list(model[2].parameters())})
    run = dynscope.load(path)
    assert scope.steps == 4
    np.testing.assert_allclose(run["gradient/norm"], wanted, rtol=1e-5)
    moved = run["update/norm"].values > 0
    assert moved[:, :2].all() and moved[:, 2:].all(axis=1).tolist() == [False, False, True, True]
    assert "added to the optimizer" in reasons(run, "group 1")
