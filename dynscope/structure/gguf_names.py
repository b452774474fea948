"""Names of tensors in GGUF files, as the modules that the rules know."""

import re
from collections.abc import Mapping

from dynscope.structure.layouts import Shape

_BLOCK = re.compile(r"(?:(enc|dec)\.)?blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")

# llama.cpp stores every merged q, k, v one after the other, whatever the model's own code does.
_IN_BLOCK = {
    "attn_q": "attn.q_proj", "attn_k": "attn.k_proj", "attn_v": "attn.v_proj",
    "attn_qkv": "attn.c_attn", "attn_output": "attn.o_proj", "attn_out": "attn.o_proj",
    "attn_q_a": "attn.q_a_proj", "attn_q_b": "attn.q_b_proj",
    "cross_attn_q": "cross_attn.q_proj", "cross_attn_k": "cross_attn.k_proj",
    "cross_attn_v": "cross_attn.v_proj", "cross_attn_o": "cross_attn.o_proj", "attn_o": "attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ssm_in": "mixer.in_proj", "ssm_out": "mixer.out_proj", "ssm_conv1d": "mixer.conv1d",
}  # fmt: skip

# Experts in one tensor are a parameter of the module that holds them.
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}  # fmt: skip

_OUTSIDE = {
    "token_embd": "embed_tokens", "position_embd": "embed_positions", "token_types": "embed_types",
    "output": "lm_head", "cls": "classifier", "cls.output": "classifier_output",
}  # fmt: skip

_PLAIN_FFN = {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}


def is_gguf(names: Mapping[str, Shape]) -> bool:
    """Whether these are GGUF's names for tensors."""
    return any(_BLOCK.fullmatch(name) for name in names)


def translated(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """The path of each tensor as the rules know it, by its name in the file."""
    return {name: _path(name, shapes) for name in shapes}


def _path(name: str, shapes: Mapping[str, Shape]) -> str:
    found = _BLOCK.fullmatch(name)
    if found is None:
        module, _, kind = name.rpartition(".")
        return f"{_OUTSIDE.get(module, module)}.{kind}"
    tower, number, module, kind = found.groups()
    block = f"{ {'enc': 'encoder.', 'dec': 'decoder.', None: ''}[tower] }layers.{number}"
    if module in _EXPERTS:
        return f"{block}.{_EXPERTS[module]}" + (f"_{kind}" if kind == "bias" else "")
    inside = _IN_BLOCK.get(module, module)
    if inside in _PLAIN_FFN:
        inside = _ffn(inside, name, module, shapes)
    return f"{block}.{inside}" + (f".{kind}" if kind else "")


def _ffn(inside: str, name: str, module: str, shapes: Mapping[str, Shape]) -> str:
    """``ffn_up`` is one matrix of a gated FFN's three, of a plain one's two, or gate and up in one."""
    place = name[: name.index(module)]
    if f"{place}ffn_gate.weight" in shapes:
        return inside
    up, down = (shapes.get(f"{place}{one}.weight", ()) for one in ("ffn_up", "ffn_down"))
    if len(up) == len(down) == 2 and up[0] == 2 * down[1]:
        return "mlp.gate_up_proj" if inside == "mlp.up_proj" else inside
    return _PLAIN_FFN[inside]
