"""Whatever a model is built of: training is bit-equal, and what is recorded equals a slow twin."""

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dynscope
from tests.bugs.conftest import quick_writer  # noqa: F401  (a fixture)
from tests.live import failures

WIDTH = 6
Spec = tuple[Any, ...]  # kind, and what is inside


class Wrap(nn.Module):
    """What real models do around a module."""

    def __init__(self, kind: str, inner: nn.Module) -> None:
        super().__init__()
        self.kind, self.inner = kind, inner

    def forward(self, x: Tensor) -> Any:
        if self.kind == "residual":
            return x + _tensor(self.inner(x))
        if self.kind == "in place":
            y = _tensor(self.inner(x)).clone()
            y += x
            return y
        if self.kind == "overwritten":  # the output of the inner module itself
            y = _tensor(self.inner(x))
            return y.mul_(2) if y.requires_grad and y is not x else 2 * y
        if self.kind == "twice":
            return _tensor(self.inner(_tensor(self.inner(x))))
        if self.kind == "tuple":
            return None, (_tensor(self.inner(x)), torch.zeros(1))
        if self.kind == "dict":
            return {"hidden": _tensor(self.inner(x)), "length": 3, "index": torch.arange(2)}
        return checkpoint(self.inner, x, use_reentrant=self.kind == "reentrant")


def _tensor(value: Any) -> Tensor:
    """The first floating tensor of an output."""
    if isinstance(value, Tensor):
        return value
    parts = value.values() if isinstance(value, dict) else value
    for part in parts:
        if isinstance(part, (dict, tuple)) or (
            isinstance(part, Tensor) and part.is_floating_point()
        ):
            return _tensor(part)
    raise TypeError(value)


WRAPS = ("residual", "in place", "overwritten", "twice", "tuple", "dict", "checkpoint", "reentrant")
LEAVES: dict[str, Any] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "relu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "dropout": lambda: nn.Dropout(0.3),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
}
trees = st.recursive(
    st.sampled_from(sorted(LEAVES)).map(lambda kind: (kind,)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(WRAPS), inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: ("chain", *parts)),
    ),
    max_leaves=6,
)


class Chain(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Any:
        for part in self.parts:
            x = _tensor(part(x))
        return x


def build(spec: Spec) -> nn.Module:
    kind, *inner = spec
    if kind == "chain":
        return Chain([build(part) for part in inner])
    return Wrap(kind, build(inner[0])) if kind in WRAPS else LEAVES[kind]()


class Whole(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.enter, self.body, self.leave = nn.Linear(4, WIDTH), build(spec), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.leave(_tensor(self.body(self.enter(x))))
        return out


class Twin:
    """Keeps every output and every gradient of one step, and computes from them at leisure."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: dict[str, list[Tensor]] = defaultdict(list)
        self.gradients: dict[str, list[Tensor]] = defaultdict(list)
        for path, module in model.named_modules():
            module.register_forward_hook(self._hook(path))

    def _hook(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            y = _tensor(output)
            if torch._C._current_graph_task_id() == -1:  # else it is recomputed
                self.outputs[path].append(y.detach().double().clone())
            if y.requires_grad:
                y.register_hook(lambda g: self.gradients[path].append(g.double().clone()))

        return hook

    def expected(self, path: str) -> dict[str, float]:
        values = torch.cat([y.flatten() for y in self.outputs[path]])
        found = {
            "activation/n_calls": float(len(self.outputs[path])),
            "activation/count": float(len(values)),
            "activation/mean": float(values.mean()),
            "activation/variance": float(values.var(correction=0)),
            "activation/absmax": float(values.abs().max()),
            "activation/zero_fraction": float((values == 0).double().mean()),
        }
        if gradients := self.gradients[path]:
            found["activation_gradient/norm"] = float(
                torch.cat([g.flatten() for g in gradients]).norm()
            )
        return found


def train(
    spec: Spec, dtype: torch.dtype, batches: int, path: Path | None, every: int
) -> tuple[list[Tensor], list[dict[str, float]], Twin | None]:
    """Two steps: weights and losses, the parameters' gradient norms, and a twin of the last step.

    Recorded where a ``path`` is given, else observed by the twin.
    """
    torch.manual_seed(0)
    model = Whole(spec).to(dtype)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05)
    scope = path and dynscope.attach(
        model, path, optimizer=optimizer, every=every, sites="leaves", summary=False
    )
    losses, norms, twin = [], [], None
    for step in range(2):
        if path is None and step == 1:
            twin = Twin(model)
        for _ in range(batches):
            loss = model(torch.randn(3, 5, 4, dtype=dtype)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        norms.append(
            {
                n: float(p.grad.double().norm())
                for n, p in model.named_parameters()
                if p.grad is not None
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    if scope:
        scope.close()
    state = [value for _, value in sorted(model.state_dict().items())]
    return [*losses, *state, torch.get_rng_state()], norms, twin


@pytest.mark.usefixtures("quick_writer")
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    trees,
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_training_is_bit_equal_and_every_record_is_right_or_declared_missing(
    spec: Spec, dtype: torch.dtype, batches: int, every: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.h5"
        try:
            plain, norms, twin = train(spec, dtype, batches, None, every)
        except RuntimeError:
            reject()  # such as overwriting what the backward needs: no model at all
        recorded, _, _ = train(spec, dtype, batches, path, every)
        run = dynscope.load(path)
        assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
        assert not failures(run) and run.steps.tolist() == [1, 2]
        for i, parameter in enumerate(run.parameters):
            wanted = norms[-1].get(parameter.name, np.nan)
            got = float(run["gradient/norm"].values[-1, i])
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-12, err_msg=parameter.name)
        assert twin is not None
        told = {(gap.path, gap.metric) for gap in run.coverage}
        for i, site in enumerate(run.sites):
            for name, value in twin.expected(site.path).items():
                got = float(run[name].values[-1, i])
                if np.isnan(got) and (site.path, name.split("/")[0]) in told:
                    continue
                np.testing.assert_allclose(
                    got, value, rtol=1e-3, atol=1e-6, err_msg=f"{site.path} {name}"
                )
