"""What a module may return and how hooks reach it; one test per reported case."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import dynscope
from tests.live import failures, parameter, reasons, site, train

pytestmark = pytest.mark.usefixtures("quick_writer")


def test_hk_01_layers_overwritten_in_place_train_and_are_recorded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    before = model[0](x).detach()
    run = train(model, tmp_path / "run.h5", [x])
    assert math.isclose(
        site(run, "activation/variance", "0"), before.var(correction=0), rel_tol=1e-5
    )
    assert site(run, "activation/absmax", "1") == before.relu().max()
    assert not failures(run)


@dataclass
class Output:
    ids: Tensor
    logits: Tensor
    unset: Any = field(init=False)


class Named(NamedTuple):
    mask: Tensor
    y: Tensor


class Returning(nn.Module):
    """Returns its layer's output inside something."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.layer, self.shape = nn.Linear(4, 4), shape

    def forward(self, x: Tensor) -> Any:
        y, ids = self.layer(x), torch.arange(3)
        return {
            "mapping": {"ids": ids, "y": y, "none": None},
            "dataclass": Output(ids, y),
            "namedtuple": Named(ids > 1, y),
            "pair": (y, None),
            "nested": (None, [ids, (y, (y * 2, None))]),
            "indices first": (y.argmax(-1), y),
            "text": ("cache", object(), y),
        }[self.shape]


def unpack(value: Any) -> Tensor:
    """The one floating tensor that the next layer takes."""
    if isinstance(value, Tensor):
        return value
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, Output):
        values = [value.logits]
    return next(
        unpack(v) for v in values
        if isinstance(v, (tuple, list)) or (isinstance(v, Tensor) and v.is_floating_point())
    )  # fmt: skip


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = ("mapping", "dataclass", "namedtuple", "pair", "nested", "indices first", "text")
        self.parts = nn.ModuleDict({shape: Returning(shape) for shape in shapes})

    def forward(self, x: Tensor) -> Any:
        for part in self.parts.values():
            x = unpack(part(x))
        return x


def test_hk_03_04_09_the_first_floating_tensor_of_any_output_is_recorded(tmp_path: Path) -> None:
    model = Many()
    run = train(model, tmp_path / "run.h5", [torch.randn(3, 4)], sites=r"parts\..*")
    assert not failures(run)
    for name in model.parts:
        for metric in ("activation/variance", "activation/n_calls", "activation_gradient/norm"):
            inner = site(run, metric, f"parts.{name}.layer")
            assert site(run, metric, f"parts.{name}") == inner, (name, metric)
            assert inner > 0


class Integers(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.argmax(-1)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.route, self.mask = nn.Linear(4, 4), Integers(), nn.Identity()

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y * self.mask(y > 0) * (1 + self.route(y))[:, None]


def test_hk_09_outputs_without_a_floating_tensor_are_left_out(tmp_path: Path) -> None:
    run = train(Routed(), tmp_path / "run.h5", [torch.randn(3, 4)])
    assert [s.path for s in run.sites] == ["layer"]
    assert "no floating" in reasons(run, "route") and "no floating" in reasons(run, "mask")
    assert not failures(run)


def test_hk_04_06_recurrent_layers_and_packed_sequences(tmp_path: Path) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LSTM(3, 4), nn.GRU(4, 4)

        def forward(self, x: PackedSequence) -> Any:
            y, _ = self.first(x)
            z, _ = self.second(y)
            return z.data

    torch.manual_seed(0)
    model = Recurrent()
    x = pack_padded_sequence(torch.randn(5, 2, 3), [5, 3])
    y = model.first(x)[0].data.detach().double().numpy()
    run = train(model, tmp_path / "run.h5", [x])
    assert site(run, "activation/count", "first") == 8 * 4  # 8 real steps, not 10 padded ones
    assert math.isclose(site(run, "activation/variance", "first"), y.var(), rel_tol=1e-5)
    assert site(run, "activation_gradient/norm", "first") > 0
    assert not failures(run)


class Keywords(nn.Module):
    """A block that is called with keyword arguments only, a floating mask first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(4), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, *, mask: Tensor, hidden: Tensor) -> Any:
        y = self.attention_norm(hidden)
        hidden = hidden + self.attention(query=y, key=y, value=y, attn_mask=mask)[0]
        return hidden + self.ffn(self.ffn_norm(hidden))


class KeywordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keywords() for _ in range(2))

    def forward(self, *, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(mask=torch.zeros(3, 3), hidden=x)
        return x


def test_hk_08_keyword_arguments_are_enough(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = KeywordModel(), torch.randn(2, 3, 4)
    y = model.blocks[0](mask=torch.zeros(3, 3), hidden=x).detach()
    run = train(model, tmp_path / "run.h5", [x], call=lambda model, x: model(x=x), sites="blocks")
    assert not failures(run)
    cosine = nn.functional.cosine_similarity(x.double(), y.double(), dim=-1)
    angle = site(run, "activation/angular_distance", "blocks.0")
    assert math.isclose(angle, cosine.arccos().mean() / math.pi, rel_tol=1e-5)


def test_hk_10_empty_and_single_outputs_need_no_special_care(tmp_path: Path) -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.one, self.scalar = nn.Linear(8, 8), nn.Linear(8, 1), nn.Flatten(0)
            self.point = nn.Identity()

        def forward(self, x: Tensor) -> Any:
            one = self.one(x[:1])
            return self.empty(x[:0]).sum() + one.sum() + self.point(one.sum())

    for bundle in ("light", "standard", "full"):
        path = tmp_path / f"{bundle}.h5"
        run = train(Sizes(), path, [torch.randn(3, 8)] * 2, metrics=bundle)
        assert not failures(run)
        if bundle == "light":
            continue
        assert site(run, "activation/n_calls", "empty") == 1
        assert site(run, "activation/count", "empty") == 0
        assert math.isnan(site(run, "activation/variance", "empty"))
        assert site(run, "activation/variance", "one") == 0
        assert site(run, "activation/variance", "point") == 0
        assert site(run, "activation/absmax", "point") > 0


def test_hk_11_layers_used_without_being_called_have_weights_but_no_activation(
    tmp_path: Path,
) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x, need_weights=False)[0]

    run = train(Attending(), tmp_path / "run.h5", [torch.randn(2, 3, 8)])
    assert parameter(run, "gradient/norm", "attention.out_proj.weight") > 0
    assert parameter(run, "gradient/norm", "attention.in_proj_weight") > 0
    assert math.isnan(site(run, "activation/variance", "attention.out_proj"))
    assert "never called" in reasons(run, "attention.out_proj")


def test_hk_13_every_parameter_is_in_exactly_one_record(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.listed = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(2))
            self.bare = nn.Parameter(torch.ones(4))
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Any:
            return self.layers[0](x * self.bare) * self.listed[0] + self.listed[1]

    model = Bare()
    run = train(model, tmp_path / "run.h5", [torch.randn(3, 4)])
    names = [p.name for p in run.parameters]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    assert np.isfinite(run["gradient/norm"].values).all()
    assert [s.path for s in run.sites] == ["layers.0"]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_hk_14_scripted_parts_are_told_once_and_the_rest_is_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    run = train(model, tmp_path / "run.h5", [torch.randn(3, 2)] * 2)
    assert site(run, "activation/variance", "1") > 0
    assert parameter(run, "gradient/norm", "0.weight") > 0
    assert len([message for message in failures(run) if message.startswith("0:")]) == 1
    assert "TorchScript" in reasons(run, "0")


def test_hk_11_metrics_that_nothing_in_the_model_has_are_told_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    run = train(nn.Sequential(nn.Linear(4, 4)), path, [torch.randn(3, 4)] * 2, metrics="full")
    told = {gap.metric: gap.reason for gap in run.coverage if not gap.path}
    for metric in run.metrics:
        values = run[metric.name].values
        empty = (
            bool((values < 0).all()) if values.dtype.kind == "i" else bool(np.isnan(values).all())
        )
        if empty and metric.axes[0] == "step":
            assert metric.name in told or metric.group in told, metric.name
    assert "no block" in told["activation/angular_distance"]
    assert "no sublayer" in told["activation/branch_ratio"]
    assert told["optimizer/eps"] == "the optimizer has no such setting"  # of SGD


def test_hk_11_without_optimizer_or_gradients_that_is_told(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, every=1, sites="leaves", summary=False) as scope:
        model(torch.randn(3, 4))
        scope.step()
    told = {gap.metric: gap.reason for gap in dynscope.load(path).coverage if not gap.path}
    assert told["optimizer"] == "no optimizer was given"
    assert "required grad" in told["activation_gradient"]
