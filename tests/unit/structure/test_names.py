"""A checkpoint's names give the roles, depths and layouts that the live model gives."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
from torch import nn

from dynscope.hooks.model.anatomy import Anatomy
from dynscope.site import Parameter
from dynscope.structure.configs import heads
from dynscope.structure.layouts import Layout, parts_of
from dynscope.structure.names import Structure, attention_kind
from tests.unit.model_families import MORE, NAMES, build


def config_of(model: nn.Module) -> dict[str, Any]:
    """The configuration as it is stored beside the weights."""
    config: Any = model.config
    config.architectures = [type(model).__name__]
    return dict(config.to_dict())


Rows = dict[str, tuple[Any, ...]]


def live(model: nn.Module) -> tuple[Rows, dict[str, Layout]]:
    anatomy = Anatomy.of(model)
    every = (*anatomy.parameters, *parts_of(anatomy.parameters, anatomy.layouts))
    return rows(every), anatomy.layouts


def rows(parameters: Iterable[Parameter]) -> Rows:
    return {p.name: (p.role, p.stack, p.depth, p.shape, p.numel, p.part_of) for p in parameters}


def stored(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes as they are in a file, where a tied weight is once."""
    tied = {name for others in Anatomy.of(model).tied.values() for name in others}
    return {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}


def said(structure: Structure) -> tuple[Rows, dict[str, Layout]]:
    return rows(structure.parameters), structure.layouts


@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_names_and_configuration_say_what_the_live_model_says(name: str) -> None:
    model, _ = build(name)
    assert said(Structure.of(stored(model), config_of(model))) == live(model)


@pytest.mark.parametrize("name", ["t5", "llama", "clip", "jamba", "mixtral"])
def test_the_order_and_the_wrappers_of_names_change_nothing(name: str) -> None:
    model, _ = build(name)
    wrapped = {f"module._orig_mod.{n}": shape for n, shape in sorted(stored(model).items())}
    structure = Structure.of(wrapped, config_of(model))
    assert said(structure) == live(model)
    assert {f"module._orig_mod.{n}": n for n in structure.stored} == {
        name: n for n, name in structure.stored.items()
    }


# Families whose code, or whose number of heads, only the configuration tells: their q, k, v stay
# merged without it.
MERGED = {"neox", "neox_sequential", "bloom", "falcon", "gpt_bigcode", "phi3"}


@pytest.mark.parametrize("name", sorted({*NAMES, *MORE} - {"gpt_bigcode_per_head"}))
def test_without_configuration_roles_are_the_same_and_nothing_is_split_wrongly(name: str) -> None:
    model, _ = build(name)
    (found, layouts), (expected, right) = said(Structure.of(stored(model))), live(model)
    assert found.items() <= expected.items()
    assert layouts.items() <= right.items()
    merged = {n for n in right.keys() - layouts.keys() if not n.endswith("bias")}
    assert {expected[n][0] for n in merged} == ({"qkv"} if name in MERGED else set())


@pytest.mark.xfail(strict=True, reason="names and shapes are GPT-2's, the rows are not")
def test_without_configuration_a_per_head_bigcode_is_taken_for_gpt2() -> None:
    model, _ = build("gpt_bigcode_per_head")
    assert said(Structure.of(stored(model))) == live(model)


LLAMA = {
    "token_embd.weight": (64, 16), "output_norm.weight": (16,), "output.weight": (64, 16),
    **{f"blk.{i}.{name}.weight": shape for i in (0, 10, 2) for name, shape in {
        "attn_norm": (16,), "attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16),
        "attn_output": (16, 16), "ffn_norm": (16,), "ffn_gate": (32, 16), "ffn_up": (32, 16),
        "ffn_down": (16, 32),
    }.items()},
}  # fmt: skip


def roles(
    shapes: dict[str, tuple[int, ...]], config: dict[str, Any] | None = None
) -> dict[str, str]:
    """The role of each weight; equal blocks are checked to agree."""
    structure = Structure.of(shapes, config)
    found: dict[str, str] = {}
    for p in structure.parameters:
        name = re.sub(r"\.\d+\.", ".#.", p.name)
        assert found.setdefault(name, p.role) == p.role
    return found


def test_gguf_names_have_roles_and_depth_by_number() -> None:
    structure = Structure.of(LLAMA)
    assert {p.name: p.depth for p in structure.parameters if "attn_q." in p.name} == {
        "blk.0.attn_q.weight": 0, "blk.2.attn_q.weight": 1, "blk.10.attn_q.weight": 2,
    }  # fmt: skip
    assert roles(LLAMA) == {
        "token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "head",
        "blk.#.attn_norm.weight": "norm", "blk.#.attn_q.weight": "q", "blk.#.attn_k.weight": "k",
        "blk.#.attn_v.weight": "v", "blk.#.attn_output.weight": "o", "blk.#.ffn_norm.weight": "norm",
        "blk.#.ffn_gate.weight": "gate", "blk.#.ffn_up.weight": "up", "blk.#.ffn_down.weight": "down",
    }  # fmt: skip


def test_gguf_names_of_plain_merged_and_mixed_ffns() -> None:
    gpt2 = {
        "blk.0.attn_qkv.weight": (48, 16), "blk.0.attn_qkv.bias": (48,),
        "blk.0.attn_output.weight": (16, 16), "blk.0.ffn_up.weight": (64, 16),
        "blk.0.ffn_down.weight": (16, 64),
    }  # fmt: skip
    metadata = {"general.architecture": "gpt2", "gpt2.attention.head_count": 4}
    for config in ({}, metadata):
        found = roles(gpt2, config)
        assert found["blk.#.ffn_up.weight"] == "in" and found["blk.#.ffn_down.weight"] == "out"
        assert found["blk.#.attn_qkv.weight[k]"] == "k"
    grouped = {**gpt2, "blk.0.attn_qkv.weight": (32, 16)}
    metadata |= {"gpt2.attention.head_count_kv": 2}
    sizes = {p.role: p.shape for p in Structure.of(grouped, metadata).parameters if p.part_of}
    assert sizes == {"q": (16, 16), "k": (8, 16), "v": (8, 16)}
    phi3 = {**gpt2, "blk.0.ffn_up.weight": (128, 16)}
    assert roles(phi3)["blk.#.ffn_up.weight[gate]"] == "gate"
    mixed = {
        **{k: v for k, v in gpt2.items() if "attn" in k},
        "blk.0.ffn_gate_inp.weight": (4, 16), "blk.0.ffn_gate_exps.weight": (4, 32, 16),
        "blk.0.ffn_up_exps.weight": (4, 32, 16), "blk.0.ffn_down_exps.weight": (4, 16, 32),
        "blk.0.ffn_gate_shexp.weight": (32, 16),
    }  # fmt: skip
    found = roles(mixed)
    assert found["blk.#.ffn_gate_inp.weight"] == "router"
    assert found["blk.#.ffn_gate_shexp.weight"] == "gate"
    assert {found[f"blk.#.ffn_{role}_exps.weight[{e}]"] for role in ("gate",) for e in (0, 3)} == {
        "gate"
    }
    assert found["blk.#.ffn_down_exps.weight[2]"] == "down"


def test_names_of_meta_llama() -> None:
    block = {
        "attention.wq": (16, 16), "attention.wk": (8, 16), "attention.wv": (8, 16),
        "attention.wo": (16, 16), "feed_forward.w1": (32, 16), "feed_forward.w2": (16, 32),
        "feed_forward.w3": (32, 16), "attention_norm": (16,), "ffn_norm": (16,),
    }  # fmt: skip
    shapes = {
        "output.weight": (64, 16), "norm.weight": (16,), "tok_embeddings.weight": (64, 16),
        **{f"layers.{i}.{n}.weight": s for i in range(2) for n, s in block.items()},
        "rope.freqs": (2,),
    }  # fmt: skip
    assert roles(shapes) == {
        "output.weight": "head", "norm.weight": "norm", "tok_embeddings.weight": "embed",
        "layers.#.attention.wq.weight": "q", "layers.#.attention.wk.weight": "k",
        "layers.#.attention.wv.weight": "v", "layers.#.attention.wo.weight": "o",
        "layers.#.feed_forward.w1.weight": "gate", "layers.#.feed_forward.w2.weight": "down",
        "layers.#.feed_forward.w3.weight": "up", "layers.#.attention_norm.weight": "norm",
        "layers.#.ffn_norm.weight": "norm",
    }  # fmt: skip


def test_names_of_nanogpt_split_rows_and_those_of_gpt2_columns() -> None:
    def shapes(flip: bool) -> dict[str, tuple[int, ...]]:
        def turn(shape: tuple[int, ...]) -> tuple[int, ...]:
            return shape[::-1] if flip else shape

        return {
            "transformer.wte.weight": (64, 16), "transformer.wpe.weight": (8, 16),
            **{f"transformer.h.{i}.{n}.weight": turn(s) for i in range(2) for n, s in {
                "attn.c_attn": (48, 16), "attn.c_proj": (16, 16), "mlp.c_fc": (64, 16),
                "mlp.c_proj": (16, 64), "ln_1": (16,),
            }.items()},
            **{f"transformer.h.{i}.attn.bias": (1, 1, 8, 8) for i in range(2)},
            "lm_head.weight": (64, 16),
        }  # fmt: skip

    for flip, dim in ((False, 0), (True, 1)):
        structure = Structure.of(shapes(flip))
        assert structure.layouts["transformer.h.1.attn.c_attn.weight"].dim == dim
        assert not [p for p in structure.parameters if p.name.endswith("attn.bias")]
        found = roles(shapes(flip))
        assert found["transformer.h.#.mlp.c_fc.weight"] == "in"
        assert found["transformer.h.#.mlp.c_proj.weight"] == "out"
        assert found["transformer.h.#.attn.c_proj.weight"] == "o"
        assert found["transformer.wpe.weight"] == "embed" and found["lm_head.weight"] == "head"


def test_names_of_a_timm_vit() -> None:
    shapes = {
        "cls_token": (1, 1, 16), "pos_embed": (1, 5, 16), "patch_embed.proj.weight": (16, 3, 4, 4),
        **{f"blocks.{i}.{n}": s for i in range(2) for n, s in {
            "norm1.weight": (16,), "attn.qkv.weight": (48, 16), "attn.qkv.bias": (48,),
            "attn.proj.weight": (16, 16), "ls1.gamma": (16,), "mlp.fc1.weight": (64, 16),
            "mlp.fc2.weight": (16, 64),
        }.items()},
        "norm.weight": (16,), "head.weight": (10, 16),
    }  # fmt: skip
    found = roles(shapes, {"architecture": "vit_tiny_patch16_224", "num_classes": 10})
    assert found["blocks.#.attn.qkv.weight[q]"] == "q" and found["blocks.#.attn.proj.weight"] == "o"
    assert found["blocks.#.mlp.fc1.weight"] == "in" and found["blocks.#.mlp.fc2.weight"] == "out"
    assert found["pos_embed"] == found["cls_token"] == found["patch_embed.proj.weight"] == "embed"
    assert found["head.weight"] == "head"


def test_attention_is_told_apart_by_its_rows() -> None:
    assert [attention_kind(16, rows, heads) for rows, heads in ((16, 4), (8, 2), (4, 1))] == [
        "MHA", "GQA", "MQA",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "shapes", [{}, {"weight": (4, 4)}, {"": (3,)}, {"a..b": (2, 2)}, {"x": ()}]
)
def test_strange_names_are_taken_as_they_are(shapes: dict[str, tuple[int, ...]]) -> None:
    assert [p.name for p in Structure.of(shapes).parameters] == list(shapes)


def roles_of(
    shapes: dict[str, tuple[int, ...]], config: dict[str, Any] | None = None
) -> dict[str, str]:
    return {one.name: one.role for one in Structure.of(shapes, config).parameters}


@pytest.mark.parametrize("block", ["block_sparse_moe", "mlp"])
def test_experts_are_known_by_the_names_that_granite_and_jetmoe_store(block: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        shapes[f"model.layers.{i}.{block}.input_linear.weight"] = (4, 256, 64)
        shapes[f"model.layers.{i}.{block}.output_linear.weight"] = (4, 64, 128)
        shapes[f"model.layers.{i}.{block}.router.layer.weight"] = (4, 64)
        shapes[f"model.layers.{i}.self_attn.q_proj.weight"] = (64, 64)
    found = Structure.of(shapes)
    roles = {one.name: one.role for one in found.parameters}
    experts = f"model.layers.1.{block}.experts"
    assert roles[f"{experts}.gate_up_proj[3.gate]"] == "gate"
    assert roles[f"{experts}.down_proj[0]"] == "down"
    assert roles[f"model.layers.0.{block}.router.weight"] == "router"
    stored = found.stored[f"{experts}.gate_up_proj"]
    assert stored == f"model.layers.1.{block}.input_linear.weight"


def test_names_of_olmo_and_megatron_have_roles() -> None:
    olmo: dict[str, tuple[int, ...]]
    olmo = {f"transformer.blocks.{i}.{name}.weight": shape for i in range(2) for name, shape in
            {"att_proj": (192, 64), "attn_out": (64, 64), "ff_proj": (256, 64), "ff_out": (64, 128)}.items()}  # fmt: skip
    roles = roles_of(olmo)
    assert [roles[f"transformer.blocks.1.{n}.weight"] for n in ("att_proj", "ff_out")] == [
        "qkv",
        "out",
    ]
    assert roles["transformer.blocks.0.attn_out.weight"] == "o"
    megatron: dict[str, tuple[int, ...]]
    megatron = {f"decoder.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in
                {"self_attention.linear_qkv": (96, 64), "self_attention.linear_proj": (64, 64),
                 "mlp.linear_fc1": (256, 64), "mlp.linear_fc2": (64, 256)}.items()}  # fmt: skip
    roles = roles_of(megatron)
    assert [*roles.values()][:4] == ["qkv", "o", "in", "out"]


def test_key_value_heads_are_found_where_mpt_and_falcon_tell_them() -> None:
    shapes: dict[str, tuple[int, ...]]
    shapes = {f"transformer.blocks.{i}.attn.Wqkv.weight": (1536, 1024) for i in range(2)}
    config = {"model_type": "mpt", "n_heads": 8, "d_model": 1024, "attn_config": {"kv_n_heads": 2}}
    parts = {one.name[-3:]: one.shape[0] for one in Structure.of(shapes, config).parameters}
    assert (parts["[q]"], parts["[k]"], parts["[v]"]) == (1024, 256, 256)
    unknown = {**config, "attn_config": {}}
    assert not any(one.part_of for one in Structure.of(shapes, unknown).parameters)
    falcon = {"model_type": "falcon", "num_attention_heads": 128, "num_kv_heads": 8,
              "new_decoder_architecture": True}  # fmt: skip
    assert heads(falcon) == (128, 8)
    assert heads({"num_heads": 16}) == (16, 16)
    assert attention_kind(2048, 128) == "GQA or MQA"
    assert attention_kind(2048, 128, 1) == "MQA" and attention_kind(2048, 256, 2) == "GQA"


def test_two_copies_of_a_model_stay_two() -> None:
    copies: dict[str, tuple[int, ...]]
    copies = {f"{wrap}layers.{i}.up.weight": (8, 4) for wrap in ("", "module.") for i in range(2)}
    assert {one.name for one in Structure.of(copies).parameters} == set(copies)
    odd: dict[str, tuple[int, ...]]
    odd = {"x.weight": (), "x.bias": (4,), "layers.\u00b2.up.weight": (4, 4)}
    assert len(Structure.of(odd).parameters) == 3
