"""A live model into a file: what is recorded is right, and training does not notice."""

import hashlib
import math
import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynscope
from dynscope.hooks.tensor.fused import Compilation
from tests.models import Decoder, Wrap, batches, directly, loss_of, nonreentrant, reentrant

Optimizer = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(params=["fused", "eager"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the compiled reduction, there from the first step, and without it."""
    if request.param == "eager":
        monkeypatch.setenv("DYNSCOPE_FUSED", "0")
    elif Compilation.shared().poll(wait=True) is None:
        pytest.skip("no C compiler")
    return str(request.param)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(
    path: Path | None,
    *,
    steps: int = 50,
    micro: int = 1,
    wrap: Wrap = directly,
    make: Optimizer = adam,
    dropout: float = 0.1,
    **options: Any,
) -> str:
    """Train and return a fingerprint of weights, gradients, losses and the random state."""
    torch.manual_seed(0)
    model = Decoder(wrap=wrap, dropout=dropout)
    optimizer = make(model.parameters())
    scope = None
    if path is not None:
        scope = dynscope.attach(model, path, optimizer=optimizer, summary=False, **options)
    digest = hashlib.sha256()
    for step in batches(steps, micro):
        optimizer.zero_grad()
        for tokens in step:
            loss = loss_of(model, tokens)
            loss.backward()
            digest.update(loss.detach().numpy().tobytes())
        for parameter in model.parameters():
            assert parameter.grad is not None
            digest.update(parameter.grad.numpy().tobytes())
        optimizer.step()
        if scope:
            scope.log(loss=loss)
    if scope:
        scope.close()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("wrap", [directly, reentrant, nonreentrant])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad.*")
def test_training_is_bit_equal_with_and_without(
    tmp_path: Path, engine: str, wrap: Wrap, micro: int
) -> None:
    plain = train(None, wrap=wrap, micro=micro)
    recorded = train(
        tmp_path / "run.h5", wrap=wrap, micro=micro, every=3, sites="leaves", metrics="full"
    )
    assert recorded == plain


@pytest.mark.parametrize("make", [adam, sgd])
@pytest.mark.parametrize("metrics", ["light", "standard"])
def test_training_is_bit_equal_for_each_bundle(
    tmp_path: Path, make: Optimizer, metrics: str
) -> None:
    plain = train(None, make=make, steps=12)
    assert train(tmp_path / "run.h5", make=make, steps=12, every=1, metrics=metrics) == plain


class Twin:
    """What bare hooks, autograd and numpy say about one step of a decoder without dropout."""

    def __init__(self, micro: int = 2) -> None:
        torch.manual_seed(0)
        self.model = Decoder(dropout=0.0)
        self.optimizer = sgd(self.model.parameters())
        self.tokens = batches(1, micro)[0]
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        self.gradients: dict[str, list[Tensor]] = {}
        self.watch()

    def hook(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.inputs.setdefault(name, []).append(inputs[0].detach().clone())
            self.outputs.setdefault(name, []).append(output.detach().clone())
            if output.requires_grad:
                output.register_hook(
                    lambda g: self.gradients.setdefault(name, []).append(g.clone())
                )

        return keep

    def watch(self) -> None:
        shadow = deepcopy(self.model)
        for name, module in shadow.named_modules():
            module.register_forward_hook(self.hook(name))
        for tokens in self.tokens:
            loss_of(shadow, tokens).backward()
        self.parameter_gradients = {
            n: p.grad for n, p in shadow.named_parameters() if p.grad is not None
        }
        before = {n: p.detach().clone() for n, p in shadow.named_parameters()}
        sgd(shadow.parameters()).step()
        self.weights = before
        self.updates = {n: p.detach() - before[n] for n, p in shadow.named_parameters()}

    def record(self, path: Path, **options: Any) -> dynscope.Run:
        optimizer = sgd(self.model.parameters())
        with dynscope.attach(
            self.model, path, optimizer=optimizer, every=1, summary=False, **options
        ):
            for tokens in self.tokens:
                loss_of(self.model, tokens).backward()
            optimizer.step()
        return dynscope.load(path)


def pooled(tensors: list[Tensor]) -> np.ndarray:
    return np.concatenate([t.double().numpy().ravel() for t in tensors])


def test_activations_and_their_gradients_equal_bare_hooks(tmp_path: Path, engine: str) -> None:
    twin = Twin()
    run = twin.record(tmp_path / "run.h5", sites="leaves")
    assert run.steps.tolist() == [1]
    for i, site in enumerate(run.sites):
        x = pooled(twin.outputs[site.path])
        value = {
            name: float(run[f"activation/{name}"].values[0, i])
            for name in ("mean", "variance", "rms", "absmax", "mean_abs", "n_calls", "count")
        }
        assert value["n_calls"] == 2
        assert value["count"] == x.size
        assert abs(value["mean"] - x.mean()) <= 1e-5 * math.sqrt((x**2).mean())
        for name, wanted in {
            "variance": x.var(),
            "rms": math.sqrt((x**2).mean()),
            "absmax": np.abs(x).max(),
            "mean_abs": np.abs(x).mean(),
        }.items():
            assert math.isclose(value[name], wanted, rel_tol=1e-5), (site.path, name)
        if site.path.endswith("ffn.up"):  # overwritten in place: its gradient never comes
            assert np.isnan(run["activation_gradient/norm"].values[0, i])
            assert any(
                gap.path == site.path and "no gradient came" in gap.reason for gap in run.coverage
            )
            continue
        g = pooled(twin.gradients[site.path])
        for name, wanted in {
            "norm": np.linalg.norm(g),
            "rms": math.sqrt((g**2).mean()),
            "absmax": np.abs(g).max(),
        }.items():
            got = float(run[f"activation_gradient/{name}"].values[0, i])
            assert math.isclose(got, wanted, rel_tol=1e-5), (site.path, name)


def test_residual_stream_metrics_equal_their_definitions(tmp_path: Path, engine: str) -> None:
    twin = Twin(micro=1)
    run = twin.record(tmp_path / "run.h5")
    at = {site.path: i for i, site in enumerate(run.sites)}
    angle, ratio = run["activation/angular_distance"], run["activation/branch_ratio"]
    for block in range(3):
        path = f"blocks.{block}"
        x, y = twin.inputs[path][0].double(), twin.outputs[path][0].double()
        cosine = nn.functional.cosine_similarity(x, y, dim=-1).clamp(-1, 1)
        wanted = float(cosine.arccos().mean() / math.pi)
        assert math.isclose(float(angle.values[0, at[path]]), wanted, rel_tol=1e-5)
        streams = {"attention": x, "ffn": twin.inputs[f"{path}.ffn_norm"][0].double()}
        for branch, stream in streams.items():
            added = twin.outputs[f"{path}.{branch}"][0].double()
            share = float((added.square().mean() / stream.square().mean()).sqrt())
            got = float(ratio.values[0, at[f"{path}.{branch}"]])
            assert math.isclose(got, share, rel_tol=1e-5)


@pytest.mark.parametrize("metrics", ["standard", "full"])
def test_gradients_and_updates_of_parameters_equal_autograd(
    tmp_path: Path, engine: str, metrics: str
) -> None:
    twin = Twin()
    run = twin.record(tmp_path / "run.h5", metrics=metrics)
    assert [p.name for p in run.parameters] == list(twin.weights)
    for i, parameter in enumerate(run.parameters):
        g = twin.parameter_gradients[parameter.name].double().numpy()
        d, w = (t[parameter.name].double().norm() for t in (twin.updates, twin.weights))
        wanted = {
            "gradient/norm": np.linalg.norm(g),
            "gradient/rms": math.sqrt((g**2).mean()),
            "gradient/absmax": np.abs(g).max(),
            "gradient/nonfinite_count": 0.0,
            "update/norm": float(d),
            "update/ratio": float(d / w) if w > 0 else math.nan,
        }
        for name, value in wanted.items():
            got = float(run[name].values[0, i])
            same = math.isclose(got, value, rel_tol=1e-5) or (math.isnan(got) and math.isnan(value))
            assert same, (parameter.name, name)
    total = math.sqrt(float((run["gradient/norm"].values[0].astype(float) ** 2).sum()))
    unique = pooled(list(twin.parameter_gradients.values()))
    assert math.isclose(total, np.linalg.norm(unique), rel_tol=1e-5)  # the tied head counts once


def test_a_sampled_update_is_within_two_percent_of_the_full_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    errors = []
    for trial in range(20):
        model = nn.Linear(700, 800, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        before = model.weight.detach().clone()
        path = tmp_path / f"{trial}.h5"
        with dynscope.attach(model, path, optimizer=optimizer, every=1, summary=False):
            model(torch.randn(16, 700)).square().mean().backward()
            with torch.no_grad():
                model.weight.grad.mul_(torch.randn_like(before))  # type: ignore[union-attr]
            optimizer.step()
        moved = float((model.weight.detach() - before).double().norm())
        got = float(dynscope.load(path)["update/norm"].values[0, 0])
        errors.append(abs(got / moved - 1))
    assert max(errors) < 0.02


def test_a_metric_of_ones_own_takes_a_few_lines(tmp_path: Path) -> None:
    twin = Twin()
    own = [
        dynscope.SiteMetric("activation/positive", lambda x: (x > 0).float().mean()),
        dynscope.SiteMetric("gradient/largest", lambda g: g.max(), merge="max", unit="loss"),
    ]
    run = twin.record(tmp_path / "run.h5", metrics=["standard", *own])
    wanted = np.mean([(t > 0).double().mean() for t in twin.outputs["blocks.1"]])
    at = [site.path for site in run.sites].index("blocks.1")
    assert math.isclose(float(run["activation/positive"].values[0, at]), wanted, rel_tol=1e-6)
    names = [p.name for p in run.parameters]
    gradient = twin.parameter_gradients["blocks.0.ffn.up.weight"]
    got = float(run["gradient/largest"].values[0, names.index("blocks.0.ffn.up.weight")])
    assert math.isclose(got, float(gradient.max()), rel_tol=1e-6)
    assert run["gradient/largest"].attrs["unit"] == "loss"


def test_a_copy_and_a_pickle_of_the_model_do_not_record(tmp_path: Path) -> None:
    model = Decoder()
    keys = set(model.state_dict())
    scope = dynscope.attach(model, tmp_path / "run.h5", every=1, summary=False)
    assert set(model.state_dict()) == keys
    for copied in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(copied, batches(1)[0][0]).backward()
    scope.step()
    scope.close()
    run = dynscope.load(tmp_path / "run.h5")
    assert len(run.sites) == 0


def test_closing_leaves_no_hook_behind(tmp_path: Path) -> None:
    def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        more = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
        found = [getattr(m, kind) for m in model.modules() for kind in (*kinds, *more)]
        found += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        found += [getattr(p, "_backward_hooks", None) or {} for p in model.parameters()]
        return repr([list(each) for each in found])

    model = Decoder()
    optimizer = sgd(model.parameters())
    before = hooks(model, optimizer)
    for _ in range(2):
        scope = dynscope.attach(
            model, tmp_path / "run.h5", optimizer=optimizer, overwrite=True, summary=False
        )
        assert hooks(model, optimizer) != before
        scope.close()
        scope.close()
        assert hooks(model, optimizer) == before


def test_two_lines_are_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Decoder()
    with dynscope.attach(model, tmp_path / "run.h5", every=10) as scope:
        for step in batches(3):
            loss_of(model, step[0]).backward()
            scope.step()
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert "10 sites over 3 blocks" in lines[0]
    assert "every 10 steps" in lines[0]
    assert str(tmp_path / "run.h5") in lines[1]
    assert "MB per 1,000 recorded steps" in lines[1]
