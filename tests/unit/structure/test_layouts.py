"""Fused weights are split into the matrices that the model's own code uses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dynscope.hooks.model.anatomy import Anatomy
from dynscope.structure.layouts import Layout
from tests.unit.model_families import build


def test_contiguous_parts_follow_each_other() -> None:
    layout = Layout(("q", "k", "v"), (4, 2, 2))
    q, k, v = (part for _, part in layout.split(torch.arange(8)[:, None] * torch.ones(1, 3)))
    assert [list(part[:, 0]) for part in (q, k, v)] == [[0, 1, 2, 3], [4, 5], [6, 7]]


def test_grouped_parts_are_gathered_from_every_head() -> None:
    layout = Layout(("q", "k", "v"), (2, 1, 1), groups=2)
    q, k, v = (part for _, part in layout.split(torch.arange(8)[:, None] * torch.ones(1, 3)))
    assert [list(part[:, 0]) for part in (q, k, v)] == [[0, 1, 4, 5], [2, 6], [3, 7]]


def test_experts_keep_a_dimension_of_their_own() -> None:
    layout = Layout(("gate", "up"), (3, 3), dim=1, experts=2)
    weight = torch.randn(2, 6, 4)
    (_, gate), (_, up) = layout.split(weight)
    assert torch.equal(gate, weight[:, :3]) and torch.equal(up, weight[:, 3:])


FUSED = {
    "gpt2": ("transformer.h.0.attn", "c_attn"),
    "neox": ("gpt_neox.layers.0.attention", "query_key_value"),
    "bloom": ("transformer.h.0.self_attention", "query_key_value"),
    "falcon": ("transformer.h.0.self_attention", "query_key_value"),
    "gpt_bigcode": ("transformer.h.0.attn", "c_attn"),
    "gpt_bigcode_per_head": ("transformer.h.0.attn", "c_attn"),
    "mpt": ("transformer.blocks.0.attn", "Wqkv"),
    "modernbert": ("model.layers.0.attn", "Wqkv"),
    "phi3": ("model.layers.0.self_attn", "qkv_proj"),
}


@pytest.mark.parametrize("name", FUSED)
def test_without_its_value_rows_attention_adds_only_its_bias(name: str) -> None:
    model, inputs = build(name)
    anatomy = Anatomy.of(model)
    path, layer = FUSED[name]
    _keep(anatomy, f"{path}.{layer}", {"q", "k"})
    mixed = _into_output(anatomy, path, model, inputs)
    assert mixed.abs().max() == 0


@pytest.mark.parametrize("name", FUSED)
def test_without_its_query_rows_attention_is_uniform(name: str) -> None:
    if name in ("bloom", "mpt"):
        pytest.skip("its position bias is added to the scores")
    model, inputs = build(name)
    anatomy = Anatomy.of(model)
    path, layer = FUSED[name]
    _keep(anatomy, f"{path}.{layer}", {"k", "v"})
    mixed = _into_output(anatomy, path, model, inputs)
    _keep(anatomy, f"{path}.{layer}", {"v"})
    assert torch.allclose(mixed, _into_output(anatomy, path, model, inputs))
    assert mixed.abs().max() > 0


def _keep(anatomy: Anatomy, layer: str, roles: set[str]) -> None:
    """Set all rows of a fused layer to zero but those of the given roles."""
    for name in (f"{layer}.weight", f"{layer}.bias"):
        if name not in anatomy.tensors:
            continue
        tensor = anatomy.tensors[name]
        places = torch.arange(tensor.numel()).view(tensor.shape)
        kept = torch.zeros(tensor.numel(), dtype=torch.bool)
        for role, part in anatomy.layouts[name].split(places):
            kept[part.reshape(-1)] = role in roles
        with torch.no_grad():
            tensor.mul_(kept.view(tensor.shape))


def _into_output(
    anatomy: Anatomy, attention: str, model: nn.Module, inputs: dict[str, Tensor]
) -> Tensor:
    """What attention mixes from its values: the input of its output matrix."""
    output = next(s.path for s in anatomy.sites if s.role == "o" and s.path.startswith(attention))
    seen: list[Tensor] = []
    handle = anatomy.modules[output].register_forward_hook(
        lambda module, args, out: seen.append(args[0].detach())
    )
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return seen[0]


def test_mixtral_computes_with_the_gate_and_up_halves_of_each_expert() -> None:
    model, _ = build("mixtral")
    anatomy = Anatomy.of(model)
    experts: Any = anatomy.modules["model.layers.0.mlp.experts"]
    gate, up = (part for _, part in anatomy.split("model.layers.0.mlp.experts.gate_up_proj"))
    ((role, down),) = anatomy.split("model.layers.0.mlp.experts.down_proj")
    x, all_of_it = torch.randn(5, 16), torch.ones(5, 1)
    for expert in range(4):
        chosen = torch.full((5, 1), expert)
        ours = (functional.silu(x @ gate[expert].T) * (x @ up[expert].T)) @ down[expert].T
        assert torch.allclose(experts(x, chosen, all_of_it), ours, atol=1e-6)
    assert role == "down"


def test_gpt_oss_interleaves_gate_and_up() -> None:
    anatomy = Anatomy.of(build("gpt_oss")[0])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (_, gate), (_, up) = anatomy.split(name)
    assert torch.equal(gate, anatomy.tensors[name][..., ::2])
    assert torch.equal(up, anatomy.tensors[name][..., 1::2])


def test_torch_attention_splits_its_input_projection_and_bias() -> None:
    anatomy = Anatomy.of(nn.TransformerEncoderLayer(8, 2, 16))
    for name in ("self_attn.in_proj_weight", "self_attn.in_proj_bias"):
        parts = anatomy.split(name)
        assert [role for role, _ in parts] == ["q", "k", "v"]
        assert torch.equal(torch.cat([part for _, part in parts]), anatomy.tensors[name])


def test_a_fused_weight_of_unknown_layout_stays_whole() -> None:
    class Attention2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = nn.Linear(8, 24)
            self.num_heads = 2

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention2()

    anatomy = Anatomy.of(nn.ModuleList([Block(), Block()]))
    ((role, weight),) = anatomy.split("0.attention.qkv_proj.weight")
    assert role == "qkv" and weight.shape == (24, 8)
