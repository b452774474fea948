"""Gradients, optimizers and loss scaling; one test per reported case."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynscope
from tests.live import failures, parameter, reasons, site, train

pytestmark = pytest.mark.usefixtures("quick_writer")
OPTIONS: dict[str, Any] = {"every": 1, "sites": "leaves", "summary": False}


def norm(tensor: Tensor | None) -> float:
    assert tensor is not None
    return float(tensor.detach().double().norm())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_gr_01_gradients_are_in_true_units_under_a_scaler(
    tmp_path: Path, fused: bool, unscale: bool
) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    y = model(x)
    *true, true_y = torch.autograd.grad(y.square().mean(), [*model.parameters(), y])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    path = tmp_path / "run.h5"
    own = dynscope.SiteMetric("gradient/own", lambda g: g.norm())
    with dynscope.attach(
        model, path, optimizer=optimizer, scaler=scaler, metrics=["standard", own], **OPTIONS
    ) as scope:
        scaler.scale(model(x).square().mean()).backward()
        if unscale:
            scaler.unscale_(optimizer)
            scope.before_clip()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
    run = dynscope.load(path)
    assert math.isclose(site(run, "activation_gradient/norm", ""), norm(true_y), rel_tol=1e-5)
    largest = float(true_y.abs().max())
    assert math.isclose(site(run, "activation_gradient/absmax", ""), largest, rel_tol=1e-5)
    wanted = 1e-3 / norm(torch.cat([g.flatten() for g in true])) if unscale else 1.0
    for name, g in zip(("weight", "bias"), true, strict=True):
        got = parameter(run, "gradient/norm", name)
        assert math.isclose(got, wanted * norm(g), rel_tol=1e-3 if unscale else 1e-5)
        assert math.isclose(parameter(run, "gradient/own", name), got, rel_tol=1e-5)
        if unscale:
            before = parameter(run, "gradient/norm_before_clip", name)
            assert math.isclose(before, norm(g), rel_tol=1e-5)


@pytest.mark.parametrize("given", [True, False], ids=["scaler given", "scaler found"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_gr_01_skipped_steps_leave_no_trace(
    tmp_path: Path, fused: bool, every: int, given: bool
) -> None:
    """Also the very first one: a loss scale starts too high more often than not."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    path = tmp_path / "run.h5"
    with dynscope.attach(
        model,
        path,
        optimizer=optimizer,
        scaler=scaler if given else None,
        **OPTIONS | {"every": every},
    ) as scope:
        for i in range(8):
            optimizer.zero_grad()
            x = torch.full((3, 4), math.inf if i in (0, 4, 5) else 1.0)
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scope.steps == 5
    run = dynscope.load(path)
    assert run.steps.tolist() == ([1, 2, 3, 4, 5] if every == 1 else [1, 3])
    assert (run["activation/n_calls"] == 1).all()
    assert (run["activation/nonfinite_count"] == 0).all()
    assert (run["gradient/nonfinite_count"] == 0).all()
    assert np.isfinite(run["activation/variance"]).all()
    if every == 1:
        assert len([event for event in run.events if event.kind == "skipped"]) == 3


def test_gr_01_two_optimizers_share_a_scaler_and_one_of_them_skips(tmp_path: Path) -> None:
    """The scale goes down because of the other optimizer: this one's step counts."""
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    path = tmp_path / "run.h5"
    with dynscope.attach(models[0], path, optimizer=optimizers[0], **OPTIONS) as scope:
        for i in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [m(torch.ones(2, 4)).square().mean() for m in models]
            scaler.scale(losses[0] + losses[1] * (math.inf if i == 1 else 1)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    run = dynscope.load(path)
    assert scope.steps == 4 and run.steps.tolist() == [1, 2, 3, 4]
    assert (run["activation/n_calls"] == 1).all()
    assert not [event for event in run.events if event.kind == "skipped"]


def test_gr_01_a_disabled_scaler_is_no_scaler(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, scaler=scaler, **OPTIONS):
        for _ in range(2):
            scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2] and not failures(run)


def test_gr_03_04_norms_are_those_applied_with_those_before_clipping_beside_them(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) as scope:
        model(torch.randn(3, 4)).square().mean().backward()
        scope.before_clip()
        before = float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
        optimizer.step()
        optimizer.zero_grad()
    run = dynscope.load(path)
    applied, given = (
        math.sqrt(float((run[f"gradient/{name}"].values[0].astype(float) ** 2).sum()))
        for name in ("norm", "norm_before_clip")
    )
    assert math.isclose(applied, 1e-3, rel_tol=1e-3)
    assert math.isclose(given, before, rel_tol=1e-5)


CLIPS: dict[str, Any] = {
    "by norm": lambda p: nn.utils.clip_grad_norm_(p, 1e-2),
    "one by one": lambda p: nn.utils.clip_grad_norm_(p, 1e-2, foreach=False),
    "by value": lambda p: nn.utils.clip_grad_value_(p, 1e-3),
    "some of them": lambda p: nn.utils.clip_grad_norm_(p[:2], 1e-2),
    "group by group": lambda p: [nn.utils.clip_grad_norm_(some, 1e-2) for some in (p[:2], p[2:])],
    "twice": lambda p: [nn.utils.clip_grad_value_(p, 1e-3), nn.utils.clip_grad_norm_(p, 1e-4)],
    "a norm found before": lambda p: nn.utils.clip_grads_with_norm_(
        p, 1e-2, nn.utils.get_total_norm([each.grad for each in p])
    ),
    "nothing that was too large": lambda p: nn.utils.clip_grad_norm_(p, 1e6),
}


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("clip", CLIPS)
def test_gr_03_what_clipping_changed_is_known_without_being_told(
    tmp_path: Path, clip: str, batches: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path, before, after = tmp_path / "run.h5", [], []
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for _ in range(3):
            for _ in range(batches):
                model(torch.randn(3, 4)).square().mean().backward()
            before.append([norm(p.grad) for p in model.parameters()])
            CLIPS[clip](list(model.parameters()))
            after.append([norm(p.grad) for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    run = dynscope.load(path)
    np.testing.assert_allclose(run["gradient/norm_before_clip"], before, rtol=1e-5)
    np.testing.assert_allclose(run["gradient/norm"], after, rtol=1e-5)
    assert not failures(run)


def _divide(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad /= 4


NOT_CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "an average": _divide,
    "a regulariser": lambda model: (
        torch.stack([p.square().sum() for p in model.parameters()]).sum().backward()
    ),
    "a norm that is only looked at": lambda model: nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    ),
    "other parameters are clipped": lambda _: nn.utils.clip_grad_norm_(_clippable(), 1e-3),
}


def _clippable() -> list[Tensor]:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return [parameter]


@pytest.mark.parametrize("then_clip", [False, True])
@pytest.mark.parametrize("change", NOT_CLIPS)
def test_gr_03_what_is_no_clipping_is_not_taken_for_one(
    tmp_path: Path, change: str, then_clip: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path, before, after = tmp_path / "run.h5", [], []
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for _ in range(3):
            model(torch.randn(3, 4)).square().mean().backward()
            NOT_CLIPS[change](model)
            before.append([norm(p.grad) for p in model.parameters()])
            if then_clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            after.append([norm(p.grad) for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    run = dynscope.load(path)
    np.testing.assert_allclose(run["gradient/norm"], after, rtol=1e-5)
    if then_clip:
        np.testing.assert_allclose(run["gradient/norm_before_clip"], before, rtol=1e-5)
    else:
        assert np.isnan(run["gradient/norm_before_clip"]).all()
        assert "no call of clip_grad_norm_" in reasons(run, "")


def test_gr_03_clipping_by_other_means_is_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path, before = tmp_path / "run.h5", []
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS) as scope:
        for _ in range(2):
            model(torch.randn(3, 4)).square().mean().backward()
            before.append([norm(p.grad) for p in model.parameters()])
            scope.before_clip()
            for p in model.parameters():
                assert p.grad is not None
                p.grad = p.grad.clamp(-1e-3, 1e-3)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-4)  # the first clipping is meant
            optimizer.step()
            optimizer.zero_grad()
    np.testing.assert_allclose(dynscope.load(path)["gradient/norm_before_clip"], before, rtol=1e-5)


def test_gr_03_clipping_each_batch_counts_as_it_was_before_the_last_time(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path, before = tmp_path / "run.h5", []
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(3, 4)).square().mean().backward()
                last = [norm(p.grad) for p in model.parameters()]
                nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            before.append(last)
            optimizer.step()
            optimizer.zero_grad()
    np.testing.assert_allclose(dynscope.load(path)["gradient/norm_before_clip"], before, rtol=1e-5)


def test_gr_03_15_sparse_gradients_leave_the_others_theirs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path, before = tmp_path / "run.h5", []
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for _ in range(2):
            model(torch.tensor([1, 1, 2])).square().mean().backward()
            before.append([norm(p.grad.to_dense()) for p in model.parameters()])  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(model[1].parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
    run = dynscope.load(path)
    np.testing.assert_allclose(run["gradient/norm_before_clip"], before, rtol=1e-5)


def test_gr_03_two_models_clip_each_its_own(tmp_path: Path) -> None:
    """One of them is never clipped, and says nothing of clipping."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()}
    path, before = tmp_path / "run.h5", []
    with dynscope.attach(model, path, optimizer=list(optimizers.values()), **OPTIONS):
        for _ in range(2):
            model["d"](model["g"](torch.randn(3, 4)).detach()).square().mean().backward()
            optimizers["d"].step()
            optimizers["d"].zero_grad()
            model["d"](model["g"](torch.randn(3, 4))).square().mean().backward()
            before.append([norm(p.grad) for p in model["g"].parameters()])
            nn.utils.clip_grad_norm_(model["g"].parameters(), 1e-3)
            optimizers["g"].step()
            optimizers["g"].zero_grad()
    run = dynscope.load(path)
    clipped = run["gradient/norm_before_clip"]
    np.testing.assert_allclose(clipped[:, :2], before, rtol=1e-5)
    assert np.isnan(clipped[:, 2:]).all()


def test_gr_03_pytorchs_clipping_is_as_it_was_after_the_last_recorder(tmp_path: Path) -> None:
    from torch.nn.utils import clip_grad

    before = vars(clip_grad).copy()
    scopes = [dynscope.attach(nn.Linear(2, 2), tmp_path / f"{name}.h5", **OPTIONS) for name in "ab"]
    for scope in scopes:
        scope.close()
    assert vars(clip_grad) == before


@pytest.mark.parametrize("clipped", [True, False])
def test_gr_03_clipping_is_seen_under_reentrant_checkpointing(
    tmp_path: Path, clipped: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path, norms, before = tmp_path / "run.h5", [], []
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(
                model[1], model[0](torch.randn(3, 4)), use_reentrant=True
            )
            x.square().mean().backward()
            before.append([norm(p.grad) for p in model.parameters()])
            if clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            norms.append([norm(p.grad) for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    run = dynscope.load(path)
    np.testing.assert_allclose(run["gradient/norm"], norms, rtol=1e-5)
    if clipped:
        np.testing.assert_allclose(run["gradient/norm_before_clip"], before, rtol=1e-5)
    else:
        assert np.isnan(run["gradient/norm_before_clip"]).all()
        assert "before_clip" in reasons(run, "")


@pytest.mark.parametrize("late", [False, True], ids=["scaler there", "scaler made later"])
@pytest.mark.parametrize("unscale", [True, False])
def test_gr_03_a_loss_scale_is_taken_out_of_the_norms_before_clipping(
    tmp_path: Path, unscale: bool, late: bool
) -> None:
    """Of the first step of a scaler that nobody told of it is not known whether it is still in."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    path, before = tmp_path / "run.h5", []
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):  # the scaler is found
        if late:
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(3):
            scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scale = 1 if unscale else 256
            before.append([norm(p.grad) / scale for p in model.parameters()])
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    run = dynscope.load(path)
    known = slice(int(late or not unscale), None)
    np.testing.assert_allclose(run["gradient/norm_before_clip"][known], before[known], rtol=1e-5)
    assert np.isnan(run["gradient/norm_before_clip"][: known.start]).all()
    assert ("was not known when they were clipped" in reasons(run, "")) == bool(known.start)


def test_gr_01_a_scaler_that_is_replaced_or_disabled_is_noticed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, wanted = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scalers: list[torch.amp.GradScaler | None] = [
        torch.amp.GradScaler("cpu", init_scale=1024.0),
        torch.amp.GradScaler("cpu", init_scale=64.0),
        torch.amp.GradScaler("cpu", enabled=False),
        None,
        torch.amp.GradScaler("cpu", init_scale=16.0),
    ]
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for scaler in scalers:
            for _ in range(2):
                y = model(torch.randn(3, 4))
                wanted.append(norm(2 * y / y.numel()))
                loss = y.square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
    run = dynscope.load(path)
    got = [site(run, "activation_gradient/norm", "", row) for row in range(len(run.steps))]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert not [event for event in run.events if event.kind == "skipped"]


@pytest.mark.parametrize("growth", [1, 2000])
@pytest.mark.parametrize("then", [0, 1, 2])
def test_gr_01_skips_before_recording_began_are_none_of_its_own(
    tmp_path: Path, then: int, growth: int
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=growth)

    def step(value: float) -> None:
        scaler.scale(model(torch.full((3, 4), value)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for value in (math.inf, math.inf, *[1.0] * then):
        step(value)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for _ in range(3):
            step(1.0)
    run = dynscope.load(path)
    assert not [event for event in run.events if event.kind == "skipped"]
    assert (run["activation/n_calls"] == 1).all()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.zeroed, self.frozen = (nn.Linear(4, 4) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.used(self.frozen(x)) + 0 * self.zeroed(x)


def test_gr_05_13_no_gradient_is_missing_and_a_zero_gradient_is_zero(tmp_path: Path) -> None:
    run = train(Branches(), tmp_path / "run.h5", [torch.randn(3, 4)] * 2)
    for name in ("norm", "rms", "absmax"):
        assert parameter(run, f"gradient/{name}", "used.weight") > 0
        assert parameter(run, f"gradient/{name}", "zeroed.weight") == 0.0
        for missing in ("unused", "frozen"):
            assert math.isnan(parameter(run, f"gradient/{name}", f"{missing}.weight"))
    assert "no gradient" in reasons(run, "unused.weight")
    assert not reasons(run, "zeroed.weight") and not reasons(run, "frozen.weight")
    assert site(run, "activation/variance", "frozen") > 0
    assert not failures(run)


def test_gr_07_a_closure_that_runs_many_times_makes_one_record(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss: Tensor = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    path = tmp_path / "run.h5"
    weights = [model.weight.detach().clone()]
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for _ in range(2):
            optimizer.step(closure)
            weights.append(model.weight.detach().clone())
            assert model.weight.grad is not None
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2]
    assert run["activation/n_calls"].sum() == calls > 2
    assert math.isclose(
        parameter(run, "gradient/norm", "weight", 1), norm(model.weight.grad), rel_tol=1e-5
    )
    for row in range(2):
        moved = norm(weights[row + 1] - weights[row])
        assert math.isclose(parameter(run, "update/norm", "weight", row), moved, rel_tol=1e-4)


def test_gr_09_without_a_grad_attribute_norms_are_missing_with_a_notice(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, **OPTIONS) as scope:
        for _ in range(2):
            gradients = torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p.sub_(0.1 * g)
            scope.step()
    run = dynscope.load(path)
    assert run["gradient/norm"].isnull().all()
    assert (run["update/norm"] > 0).all()
    assert site(run, "activation_gradient/norm", "") > 0
    assert "no parameter had a gradient" in reasons(run, "")


def test_gr_11_the_gradient_is_the_accumulated_one(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        y = model(torch.randn(3, 4))
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        wanted = norm(model.weight.grad)
        optimizer.step()
    run = dynscope.load(path)
    assert math.isclose(parameter(run, "gradient/norm", "weight"), wanted, rel_tol=1e-5)


def test_gr_12_the_gradients_of_a_discriminator_are_those_of_its_own_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    g, d = nn.Linear(2, 4), nn.Linear(4, 1)
    optimizer_g, optimizer_d = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (g, d))
    path = tmp_path / "run.h5"
    wanted = []
    with dynscope.attach(d, path, optimizer=optimizer_d, **OPTIONS):
        for _ in range(3):
            optimizer_d.zero_grad()
            (d(g(torch.randn(3, 2)).detach()) - d(torch.randn(3, 4))).square().mean().backward()
            wanted.append(norm(d.weight.grad))
            optimizer_d.step()
            optimizer_g.zero_grad()
            (100 * d(g(torch.randn(3, 2)))).mean().backward()  # leaves gradients in d
            optimizer_g.step()
    run = dynscope.load(path)
    got = [parameter(run, "gradient/norm", "weight", row) for row in range(3)]
    assert np.allclose(got, wanted, rtol=1e-5)
    assert (run["activation/n_calls"] == 2).all()  # not the pass in the generator's step
    assert "cleared before a step" in reasons(run, "")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gr_12_a_batch_that_the_loop_throws_away_does_not_count(
    tmp_path: Path, set_to_none: bool
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        for size in (1.0, 1e6, 2.0):
            optimizer.zero_grad(set_to_none)
            loss = model(torch.full((2, 4), size)).square().mean()
            loss.backward()
            if loss < 1e6:
                optimizer.step()
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2] and (run["activation/n_calls"] == 1).all()
    assert float(run["activation/absmax"].max()) < 100


def test_gr_07_an_optimizer_inside_the_backward_leaves_no_gradient_and_that_is_said(
    tmp_path: Path,
) -> None:
    """One optimizer per parameter steps as soon as its gradient is there, to save memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        own[parameter].step()  # type: ignore[index]
        own[parameter].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, **OPTIONS) as scope:
        for _ in range(3):
            model(torch.randn(3, 4)).square().mean().backward()
            scope.step()
    run = dynscope.load(path)
    assert run.steps.tolist() == [1, 2, 3] and (run["activation/n_calls"] == 1).all()
    assert np.isnan(run["gradient/norm"]).all() and (run["update/norm"] > 0).all()
    assert "no parameter had a gradient" in reasons(run, "") and not failures(run)


def test_gr_15_repeated_rows_of_a_sparse_gradient_are_added_up(tmp_path: Path) -> None:
    norms = []
    for sparse in (True, False):
        model = nn.Embedding(10, 4, sparse=sparse)
        path = tmp_path / f"{sparse}.h5"
        run = train(model, path, [torch.tensor([1, 1])], loss=lambda y: y.sum())
        norms.append([parameter(run, f"gradient/{name}", "weight") for name in ("norm", "rms")])
        assert math.isclose(parameter(run, "update/norm", "weight"), 0.04, rel_tol=1e-4)
        assert not failures(run)
    assert norms[0] == norms[1] and norms[0][0] == 4.0


def test_gr_17_parameters_put_in_place_of_others_are_followed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, **OPTIONS) as scope:
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        model[1].weight = nn.Parameter(torch.randn(4, 4))
        model(x).square().mean().backward()
        wanted = {name: norm(p.grad) for name, p in model.named_parameters()}
        scope.step()
    run = dynscope.load(path)
    for name, value in wanted.items():
        assert math.isclose(parameter(run, "gradient/norm", name), value, rel_tol=1e-5)


def test_gr_18_infinite_gradients_are_counted_and_left_as_they_are(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, metrics="full", **OPTIONS) as scope:
        model(torch.ones(1, 2)).sum().backward()
        model.weight.grad = torch.tensor([[math.inf, 1.0]])
        scope.before_clip()
        optimizer.step()
        assert model.weight.grad.tolist() == [[math.inf, 1.0]]
    run = dynscope.load(path)
    assert parameter(run, "gradient/norm", "weight") == math.inf
    assert parameter(run, "gradient/nonfinite_count", "weight") == 1
    assert not failures(run)


@pytest.mark.parametrize("first", [True, False])
def test_gr_19_hooks_of_the_users_that_change_gradients_are_respected(
    tmp_path: Path, first: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def clamp(g: Tensor) -> Tensor:
        return g.clamp(-1e-3, 1e-3)

    if first:
        model.weight.register_hook(clamp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, **OPTIONS):
        if not first:
            model.weight.register_hook(clamp)
        model(torch.randn(3, 4)).square().sum().backward()
        wanted = norm(model.weight.grad)
        optimizer.step()
    assert wanted <= 4e-3 * (1 + 1e-6)
    run = dynscope.load(path)
    assert math.isclose(parameter(run, "gradient/norm", "weight"), wanted, rel_tol=1e-5)


def test_gr_01_several_optimizers_of_which_one_is_fused_skip_together(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [
        torch.optim.SGD(model[0].parameters(), 0.1),
        torch.optim.AdamW(model[1].parameters(), fused=True),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizers, **OPTIONS) as scope:
        for i in range(4):
            x = torch.full((2, 4), math.inf if i == 2 else 1.0)
            scaler.scale(model(x).square().mean()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
    run = dynscope.load(path)
    assert scope.steps == 3 and run.steps.tolist() == [1, 2, 3]
    assert (run["activation/n_calls"] == 1).all() and (run["gradient/nonfinite_count"] == 0).all()
    assert [event.kind for event in run.events].count("skipped") == 1
