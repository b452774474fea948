"""What a checkpoint's configuration says that names and shapes do not: heads, and the code's family."""

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

# What transformers' modules are told about experts in one tensor, by model_type.
_EXPERTS: dict[str, dict[str, bool]] = {
    "gpt_oss": {"is_concatenated": False, "is_transposed": True},
    "llama4": {"is_transposed": True},
}

# Where transformers' class names begin otherwise than model_type suggests.
_PREFIXES = {"gpt_neox": "GPTNeoX", "gpt_bigcode": "GPTBigCode"}

_TOWERS = {"vision_config": r"vis(ion|ual)|image", "audio_config": "audio|sound"}
_MULTI_QUERY = ("gpt_bigcode", "falcon")  # by default


class Settings(SimpleNamespace):
    """What a module's code would know: the number of heads and the layout of experts.

    Has the attributes that `dynscope.structure.layouts` asks of a live module, where
    ``config`` (Hugging Face's, or the metadata of a GGUF file) gives them; ``path`` is the module's.
    """

    def __init__(self, config: Mapping[str, Any], path: str = "") -> None:
        said = _tower(_from_gguf(config), path)
        kind = str(said.get("model_type") or config.get("model_type") or "")
        super().__init__(config=SimpleNamespace(**said), **_EXPERTS.get(kind.split("_text")[0], {}))
        nested = said.get("attn_config")
        if isinstance(nested, Mapping) and isinstance(nested.get("kv_n_heads"), int):
            self.num_key_value_heads = nested["kv_n_heads"]  # MPT
        shared = said.get("multi_query", kind in _MULTI_QUERY)
        if kind in _MULTI_QUERY and shared and not said.get("new_decoder_architecture"):
            self.num_key_value_heads = 1


def family_prefix(config: Mapping[str, Any]) -> str:
    """How the names of a model's classes begin: ``GPTNeoX`` for ``GPTNeoXForCausalLM``."""
    classes = config.get("architectures") or ()
    if isinstance(classes, (list, tuple)) and classes:
        return re.split(r"For[A-Z]|LMHead|Model$", str(classes[0]))[0]
    kind = str(config.get("model_type", ""))
    return _PREFIXES.get(kind, "".join(word.title() for word in kind.split("_")))


def heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Query heads and key-value heads, 0 where the configuration does not say."""
    settings = Settings(config)
    said = vars(settings.config)
    names = ("num_attention_heads", "n_head", "n_heads", "num_heads")
    query = next((said[n] for n in names if n in said), 0)
    told = (said.get(name) for name in ("num_key_value_heads", "num_kv_heads", "n_head_kv"))
    key = getattr(settings, "num_key_value_heads", None) or next(filter(None, told), query)
    counts = all(isinstance(one, int) and one > 0 for one in (query, key))
    return (query, key) if counts else (0, 0)


def _tower(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The part of a configuration of several towers that is of this module."""
    for name, pattern in _TOWERS.items():
        inner = config.get(name)
        if isinstance(inner, Mapping) and re.search(pattern, path):
            return _plain(inner)
    inner = config.get("text_config")
    return _plain({**config, **inner} if isinstance(inner, Mapping) else config)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in config.items()}


def _from_gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """GGUF's metadata under Hugging Face's names."""
    family = config.get("general.architecture")
    if family is None:
        return config
    names = {
        "num_attention_heads": "head_count",
        "num_key_value_heads": "head_count_kv",
        "head_dim": "key_length",
    }
    found = {name: config.get(f"{family}.attention.{key}") for name, key in names.items()}
    return {name: value for name, value in found.items() if value is not None}
