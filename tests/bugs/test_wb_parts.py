"""Weights that hold several matrices are recorded matrix by matrix, and whole as well."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynscope
from dynscope import weibull
from dynscope.site import Parameter, undivided, wholes
from examples import pre_ln
from tests.bugs.test_anatomy import SMALL, BaseTunerLayer, PeftModel
from tests.unit.model_families import build


def record(model: nn.Module, path: Path) -> dynscope.Run:
    """A run that holds the weights as they are."""
    dynscope.attach(model, path, summary=False).close()
    return dynscope.load(path)


def at(run: dynscope.Run, metric: str, name: str) -> float:
    values = run[f"weight/{metric}"][-1]
    return float(values[values["name"] == name].item())


def entry(run: dynscope.Run, name: str) -> Parameter:
    return next(parameter for parameter in run.parameters if parameter.name == name)


def norm(weight: Tensor) -> float:
    return float(weight.detach().double().norm())


def test_wb_09_q_k_and_v_of_a_conv1d_are_its_columns(tmp_path: Path) -> None:
    model, _ = build("gpt2")
    name = "transformer.h.1.attn.c_attn.weight"
    weight = model.get_parameter(name)
    scales = {"q": 1.0, "k": 5.0, "v": 0.2}
    with torch.no_grad():
        for index, scale in enumerate(scales.values()):
            weight[:, 16 * index : 16 * (index + 1)].normal_().mul_(scale)
    run = record(model, tmp_path / "run.h5")
    for index, (role, scale) in enumerate(scales.items()):
        part = entry(run, f"{name}[{role}]")
        assert (part.role, part.depth, part.part_of, part.shape) == (role, 1, name, (16, 16))
        own = weight[:, 16 * index : 16 * (index + 1)]
        assert at(run, "norm", part.name) == pytest.approx(norm(own), rel=1e-6)
        assert at(run, "rms", part.name) == pytest.approx(scale, rel=0.15)
        k = weibull.fit(own.detach().numpy()).k
        assert at(run, "weibull_k", part.name) == pytest.approx(k, rel=1e-5)
    assert (entry(run, name).role, entry(run, name).part_of) == ("qkv", "")
    assert at(run, "norm", name) == pytest.approx(norm(weight), rel=1e-6)


@pytest.mark.parametrize("family", ["neox", "bloom"])
def test_wb_11_per_head_interleaved_weights_are_gathered_head_by_head(
    tmp_path: Path, family: str
) -> None:
    model, _ = build(family)
    run = record(model, tmp_path / "run.h5")
    name = next(n for n, _ in model.named_parameters() if n.endswith("query_key_value.weight"))
    heads = model.get_parameter(name).unflatten(0, (4, 3, 4))
    for index, role in enumerate("qkv"):
        found = at(run, "norm", f"{name}[{role}]")
        assert found == pytest.approx(norm(heads[:, index]), rel=1e-6)


def test_a_fused_weight_of_unknown_layout_stays_whole(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.ModuleDict({"in_proj": nn.Linear(8, 25), "out": nn.Linear(8, 8)})

    run = record(nn.Sequential(Odd(), Odd(), Odd()), tmp_path / "run.h5")
    assert wholes(run.parameters) == run.parameters


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_wb_12_every_expert_has_its_gate_up_and_down(tmp_path: Path, family: str) -> None:
    model, _ = build(family)
    run = record(model, tmp_path / "run.h5")
    prefix = "model.layers.1.mlp.experts"
    gate_up = model.get_parameter(f"{prefix}.gate_up_proj")
    halves = (
        (gate_up[:, :, ::2], gate_up[:, :, 1::2])  # gpt-oss: transposed and interleaved
        if family == "gpt_oss"
        else gate_up.split(gate_up.shape[1] // 2, 1)
    )
    for role, half in zip(("gate", "up"), halves, strict=True):
        for expert in range(4):
            part = entry(run, f"{prefix}.gate_up_proj[{expert}.{role}]")
            assert (part.role, part.depth) == (role, 1)
            assert at(run, "norm", part.name) == pytest.approx(norm(half[expert]), rel=1e-6)
    for expert, down in enumerate(model.get_parameter(f"{prefix}.down_proj")):
        part = entry(run, f"{prefix}.down_proj[{expert}]")
        assert part.role == "down" and part.shape == tuple(down.shape)
        assert at(run, "norm", part.name) == pytest.approx(norm(down), rel=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "neox", "mixtral", "phi3", "gpt_oss"])
def test_parts_and_wholes_each_add_up_to_the_model(tmp_path: Path, family: str) -> None:
    model, _ = build(family)
    run = record(model, tmp_path / "run.h5")
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(one.numel for one in wholes(run.parameters)) == total
    assert sum(one.numel for one in undivided(run.parameters)) == total
    squares = run["weight/norm"][-1].astype(np.float64) ** 2
    for kind in (wholes, undivided):
        own = squares[np.isin(squares["name"], [one.name for one in kind(run.parameters)])]
        twin = sum(norm(parameter) ** 2 for parameter in model.parameters())
        assert float(own.sum()) == pytest.approx(twin, rel=1e-5)


def test_wb_14_frozen_base_and_adapters_are_measured_apart(tmp_path: Path) -> None:
    model = pre_ln.build(SMALL)
    for block in model.blocks:
        attention = block.get_submodule("attention")
        attention.q = BaseTunerLayer(attention.get_submodule("q"))  # type: ignore[arg-type]
    tuned = PeftModel(model)
    run = record(tuned, tmp_path / "run.h5")
    names = {"blocks.0.attention.q.weight": ("q", False, "base_layer.weight")} | {
        f"blocks.0.attention.q.lora_{x}.default.weight": (
            "adapter",
            True,
            f"lora_{x}.default.weight",
        )
        for x in "AB"
    }
    layer = model.get_submodule("blocks.0.attention.q")
    for name, (role, trainable, own) in names.items():
        assert (entry(run, name).role, entry(run, name).trainable) == (role, trainable)
        assert at(run, "norm", name) == pytest.approx(norm(layer.get_parameter(own)), rel=1e-6)


def test_a_sharded_or_replaced_weight_is_missing_in_every_part(tmp_path: Path) -> None:
    model, _ = build("gpt2")
    layer = model.get_submodule("transformer.h.0.attn.c_attn")
    scope = dynscope.attach(model, tmp_path / "run.h5", summary=False, weights_every=1)
    layer.weight = nn.Parameter(torch.ones(3, 5))
    scope.step()
    scope.close()
    norms = dynscope.load(tmp_path / "run.h5")["weight/norm"]
    own = norms[:, norms["name"] == "transformer.h.0.attn.c_attn.weight[q]"]
    assert np.isnan(own.values).ravel().tolist() == [False, True]
