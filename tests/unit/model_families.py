"""Small, randomly initialised models of the families people train, and inputs for each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Tensor]]

TOKENS = torch.arange(6)[None] % 5 + 3
PIXELS = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)

_SIZE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    **_SIZE, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_GROUPED: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2, "head_dim": 4}
_GPT: dict[str, Any] = {
    "n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 32, "n_ctx": 32,
    "attn_pdrop": 0.0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_BART: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip

# Name -> class of the model, class of its configuration, its settings.
_CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 4}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _TEXT),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_TEXT, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _TEXT),
    "neox_sequential": (
        "GPTNeoXForCausalLM", "GPTNeoXConfig", {**_TEXT, "use_parallel_residual": False},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _TEXT),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _GROUPED),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _GROUPED),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_TEXT, "num_key_value_heads": 2}),
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig",
        {**_TEXT, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {
            **_TEXT, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**_GROUPED, "num_local_experts": 4}),
    "mamba": (
        "MambaForCausalLM", "MambaConfig",
        {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "state_size": 4},
    ),
    "bloom": (
        "BloomForCausalLM", "BloomConfig",
        {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40},
    ),
    "falcon": (
        "FalconForCausalLM", "FalconConfig",
        {
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40,
            "new_decoder_architecture": True, "num_kv_heads": 2, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        {
            "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": 40, "word_embed_proj_dim": 16, "max_position_embeddings": 32,
        },
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _TEXT),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _TEXT),
    "distilbert": (
        "DistilBertModel", "DistilBertConfig",
        {
            "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 40,
            "max_position_embeddings": 32,
        },
    ),
}  # fmt: skip

_PICTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": (
        "ViTForImageClassification", "ViTConfig", {**_SIZE, "image_size": 16, "patch_size": 8},
    ),
    "resnet": (
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"},
    ),
}  # fmt: skip

_TWO_STACKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {
            "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4,
            "vocab_size": 40, "decoder_start_token_id": 0,
        },
    ),
    "t5_gated": (
        "T5ForConditionalGeneration", "T5Config",
        {
            "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4,
            "vocab_size": 40, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
        },
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", _BART),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 8},
    ),
}  # fmt: skip

# Families whose residual stream is checked by numbers, and whose roles are not written down.
_MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "glm4": ("Glm4ForCausalLM", "Glm4Config", _GROUPED),
    "phi": ("PhiForCausalLM", "PhiConfig", _TEXT),
    "mpt": (
        "MptForCausalLM", "MptConfig",
        {"d_model": 16, "n_heads": 4, "n_layers": 2, "vocab_size": 40, "max_seq_len": 32},
    ),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT),
    "gpt_bigcode_per_head": (
        "GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**_GPT, "multi_query": False},
    ),
    "modernbert": (
        "ModernBertForMaskedLM", "ModernBertConfig", {**_TEXT, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "jamba": (
        "JambaForCausalLM", "JambaConfig",
        {
            **_TEXT, "num_key_value_heads": 2, "use_mamba_kernels": False, "num_experts": 4,
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM", "Lfm2Config",
        {**_TEXT, "layer_types": ["conv", "full_attention"], "num_key_value_heads": 2},
    ),
}  # fmt: skip

NAMES = (*_CAUSAL, *_PICTURES, *_TWO_STACKS, "clip")
MORE = tuple(_MORE)


def build(name: str) -> Built:
    """The model, in training mode and without dropout, and the keyword arguments of its forward."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "clip":
        model, inputs = _clip()
    elif name in _CAUSAL or name in _MORE:
        model, inputs = _make((_CAUSAL | _MORE)[name]), {"input_ids": TOKENS}
    elif name in _PICTURES:
        model, inputs = _make(_PICTURES[name]), {"pixel_values": PIXELS}
    else:
        model = _make(_TWO_STACKS[name])
        inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
        if name == "whisper":
            sound = torch.linspace(-1, 1, 8 * 16).view(1, 8, 16)
            inputs = {"input_features": sound, "decoder_input_ids": TOKENS}
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):  # used functionally
            module.dropout = 0.0  # type: ignore[assignment]
    return model.train(), inputs


def _make(entry: tuple[str, str, dict[str, Any]]) -> nn.Module:
    import transformers

    model, config, settings = entry
    built: Callable[[Any], nn.Module] = getattr(transformers, model)
    return built(getattr(transformers, config)(**settings))


def _clip() -> Built:
    import transformers

    settings = {**_SIZE, "projection_dim": 8}
    config = transformers.CLIPConfig(
        text_config={**settings, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**settings, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    return transformers.CLIPModel(config), {"input_ids": TOKENS, "pixel_values": PIXELS}
