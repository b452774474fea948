"""The tables of families: each role by the names that codebases use, each entry well formed."""

import pytest

from dynscope.hooks.model.families import FAMILIES
from dynscope.site import ROLES
from dynscope.structure.roles import SUBLAYERS
from dynscope.structure.rules import RULES, rule_for


@pytest.mark.parametrize(
    ("role", "zone", "names"),
    [
        ("attention", "block", "attn self_attn attention self_attention SelfAttention"),
        ("cross_attention", "block", "cross_attn encoder_attn crossattention EncDecAttention"),
        ("ffn", "block", "mlp ffn feed_forward ff moe DenseReluDense block_sparse_moe"),
        ("mixer", "block", "mixer mamba ssm temporal_block"),
        ("q", "attention", "q wq q_proj query q_lin to_q"),
        ("k", "attention", "k wk k_proj key k_lin to_k"),
        ("v", "attention", "v wv v_proj value v_lin to_v"),
        ("qkv", "attention", "qkv c_attn query_key_value Wqkv qkv_proj in_proj"),
        ("o", "attention", "o wo o_proj out_proj out_lin c_proj dense proj"),
        ("gate", "ffn", "gate gate_proj wi_0"),
        ("up", "ffn", "up up_proj wi_1"),
        ("down", "ffn", "down down_proj"),
        ("gate_up", "ffn", "gate_up_proj w12"),
        ("in", "ffn", "c_fc fc1 linear1 lin1 wi dense_h_to_4h fc_in"),
        ("out", "ffn", "c_proj fc2 linear2 lin2 wo dense_4h_to_h fc_out"),
        ("in", "mixer", "in_proj"),
        ("out", "mixer", "out_proj"),
        ("embed", "outside", "embed wte wpe tok_embeddings embed_tokens patch_embed pos_embed"),
        ("head", "outside", "head lm_head classifier score proj_out output_projection"),
    ],
)
def test_a_linear_layer_has_its_role_by_name_and_place(role: str, zone: str, names: str) -> None:
    for name in names.split():
        rule = rule_for(zone, name, ("Linear",))
        assert (name, rule.role if rule else None) == (name, role)


@pytest.mark.parametrize(
    ("role", "kinds"),
    [
        ("norm", "LayerNorm RMSNorm BatchNorm2d T5LayerNorm LlamaRMSNorm GroupNorm DyT"),
        ("dropout", "Dropout Dropout2d DropPath StochasticDepth"),
        ("activation", "ReLU GELU SiLU NewGELUActivation Softmax Sigmoid Tanh PReLU BloomGelu"),
        ("pool", "MaxPool2d AdaptiveAvgPool2d AvgPool1d"),
        ("conv", "Conv2d Conv1d ConvTranspose3d"),
    ],
)
def test_a_layer_has_its_role_by_class_wherever_it_is(role: str, kinds: str) -> None:
    for kind in kinds.split():
        for zone in ("outside", "block", "attention", "ffn", "mixer", "head"):
            rule = rule_for(zone, "x", (kind,))
            assert (kind, rule.role if rule else None) == (kind, role)


def test_a_gate_beside_experts_is_a_router() -> None:
    router, gate = (
        rule_for("ffn", "gate", ("Linear",), ("experts",)),
        rule_for("ffn", "gate", ("Linear",)),
    )
    assert router is not None and router.role == "router"
    assert gate is not None and gate.role == "gate"


def test_w1_and_w2_are_gate_and_down_only_beside_w3() -> None:
    names = ("w1", "w2", "w3")
    rules = [rule_for("ffn", n, ("Linear",), tuple(m for m in names if m != n)) for n in names]
    assert [rule.role if rule else None for rule in rules] == ["gate", "down", "up"]
    assert rule_for("ffn", "w1", ("Linear",), ("w2",)) is None


def test_a_name_nobody_uses_has_no_rule() -> None:
    assert rule_for("block", "frobnicator", ("Frobnicator",), layer=False) is None


def test_every_entry_of_the_tables_is_well_formed() -> None:
    assert {rule.role for rule in RULES} <= set(ROLES)
    for family in FAMILIES:
        assert family.has
        assert {route.role for route in family.routes} <= set(SUBLAYERS)
