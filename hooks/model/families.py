"""How the blocks of known families are wired: where each sublayer's residual is, as a table that grows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """Where a sublayer of a block leaves the residual stream and where it comes back.

    Paths are relative to the block, "" is the block itself. The input of ``residual`` is the stream
    that the output of ``branch`` is added to. A field left None is the sublayer itself.
    """

    role: str
    residual: str | None = ""
    branch: str | None = None


@dataclass(frozen=True)
class Family:
    """Blocks that have all the modules of ``has`` and none of ``lacks``, and what their code does.

    ``kind`` must begin one of the block's class names. ``pre_norm`` is what the block's own
    attribute must say (``norm_first`` in torch, ``do_layer_norm_before`` in transformers).
    """

    has: tuple[str, ...]
    routes: tuple[Route, ...]
    lacks: tuple[str, ...] = ()
    kind: str = ""
    pre_norm: bool | None = None


_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_BART_NORMS = ("self_attn_layer_norm", "final_layer_norm", "fc1", "fc2")

# Families whose order of definition does not tell how they are wired. The first that fits is used.
FAMILIES: tuple[Family, ...] = (
    Family(  # torch.nn's encoder layer, Pre-LN
        ("self_attn", "linear1", "linear2", "norm1", "norm2", "dropout1", "dropout2"),
        (Route("attention", "", "dropout1"), Route("ffn", "norm2", "dropout2")),
        lacks=("multihead_attn",), pre_norm=True,
    ),
    Family(  # the same, Post-LN
        ("self_attn", "linear1", "linear2", "norm1", "norm2", "dropout1", "dropout2"),
        (Route("attention", "", "dropout1"), Route("ffn", "linear1", "dropout2")),
        lacks=("multihead_attn",), pre_norm=False,
    ),
    Family(
        ("multihead_attn", "linear1", "linear2", "norm3", "dropout3"),
        (
            Route("attention", "", "dropout1"),
            Route("cross_attention", "norm2", "dropout2"),
            Route("ffn", "norm3", "dropout3"),
        ),
        pre_norm=True,
    ),
    Family(
        ("multihead_attn", "linear1", "linear2", "norm3", "dropout3"),
        (
            Route("attention", "", "dropout1"),
            Route("cross_attention", None, "dropout2"),
            Route("ffn", "linear1", "dropout3"),
        ),
        pre_norm=False,
    ),
    Family(  # BERT, RoBERTa: the residual is added inside the two modules called output
        ("attention.output.LayerNorm", "intermediate", "output.dense", "output.LayerNorm"),
        (
            Route("attention", "", "attention.output.dense"),
            Route("ffn", "intermediate", "output.dense"),
        ),
    ),
    Family(("albert_layers.0.ffn_output",), ()),  # ALBERT: sums inside, one level down: unknown
    Family(  # DistilBERT
        ("attention", "sa_layer_norm", "ffn", "output_layer_norm"),
        (Route("attention"), Route("ffn", None)),
    ),
    Family(  # T5's encoder
        ("layer.0.SelfAttention", "layer.1.DenseReluDense"),
        (
            Route("attention", "layer.0", "layer.0.dropout"),
            Route("ffn", "layer.1", "layer.1.dropout"),
        ),
    ),
    Family(  # T5's decoder
        ("layer.0.SelfAttention", "layer.1.EncDecAttention", "layer.2.DenseReluDense"),
        (
            Route("attention", "layer.0", "layer.0.dropout"),
            Route("cross_attention", "layer.1", "layer.1.dropout"),
            Route("ffn", "layer.2", "layer.2.dropout"),
        ),
    ),
    Family(  # Gemma 2 and 3: a norm on both sides of each sublayer
        _LLAMA_NORMS + _GEMMA_NORMS,
        (
            Route("attention", "", "post_attention_layernorm"),
            Route("ffn", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ),
    ),
    Family(  # OLMo 2: a norm on each sublayer's output, before it is added
        ("post_attention_layernorm", "post_feedforward_layernorm"),
        (
            Route("attention", "", "post_attention_layernorm"),
            Route("ffn", None, "post_feedforward_layernorm"),
        ),
        lacks=("input_layernorm", "pre_feedforward_layernorm"),
    ),
    Family(  # GLM 4: the same under other names
        (*_LLAMA_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
        (
            Route("attention", "", "post_self_attn_layernorm"),
            Route("ffn", "post_attention_layernorm", "post_mlp_layernorm"),
        ),
    ),
    Family(  # BLOOM adds the residual inside its sublayers
        (*_LLAMA_NORMS, "self_attention.query_key_value", "mlp.gelu_impl", "mlp.dense_4h_to_h"),
        (
            Route("attention", "", "self_attention.dense"),
            Route("ffn", "post_attention_layernorm", "mlp.dense_4h_to_h"),
        ),
    ),
    Family(  # GPT-NeoX, one after the other or in parallel: both read what they are added to
        (*_LLAMA_NORMS, "post_attention_dropout", "post_mlp_dropout"),
        (
            Route("attention", "", "post_attention_dropout"),
            Route("ffn", "post_attention_layernorm", "post_mlp_dropout"),
        ),
    ),
    Family(  # Llama, Qwen, Mistral, Mixtral, Phi-3
        _LLAMA_NORMS,
        (Route("attention"), Route("ffn", "post_attention_layernorm")),
    ),
    Family(  # Jamba
        ("input_layernorm", "pre_ff_layernorm"),
        (Route("attention"), Route("mixer"), Route("ffn", "pre_ff_layernorm")),
    ),
    Family(  # GPT-2 with cross-attention, whose norm is defined behind it
        ("ln_1", "ln_2", "ln_cross_attn"),
        (
            Route("attention"),
            Route("cross_attention", "ln_cross_attn"),
            Route("ffn", "ln_2"),
        ),
    ),
    Family(  # MPT: the FFN adds the residual itself
        ("norm_1", "attn.Wqkv", "norm_2", "ffn.down_proj"),
        (Route("attention"), Route("ffn", "norm_2", "ffn.down_proj")),
    ),
    Family(  # LFM 2
        ("operator_norm", "ffn_norm"),
        (Route("attention"), Route("mixer"), Route("ffn", "ffn_norm")),
    ),
    Family(("ln_attn", "ln_mlp"), (Route("attention"), Route("ffn", "ln_mlp"))),  # Falcon
    Family(  # DeiT, BEiT and others: the residual is added inside `output`
        ("layernorm_before", "layernorm_after", "intermediate", "output.dense"),
        (Route("attention"), Route("ffn", "layernorm_after", "output.dense")),
    ),
    Family(  # ViT
        ("layernorm_before", "layernorm_after"),
        (Route("attention"), Route("ffn", "layernorm_after")),
    ),
    Family(  # CLIP, SigLIP
        ("layer_norm1", "layer_norm2"),
        (Route("attention"), Route("ffn", "layer_norm2")),
    ),
    Family(_BART_NORMS, (Route("attention"), Route("ffn", "final_layer_norm")), pre_norm=True),
    Family(_BART_NORMS, (Route("attention"), Route("ffn", "fc1")), pre_norm=False),
    Family(
        ("encoder_attn_layer_norm", *_BART_NORMS),
        (
            Route("attention"),
            Route("cross_attention", "encoder_attn_layer_norm"),
            Route("ffn", "final_layer_norm"),
        ),
        kind="Whisper",
    ),
    Family(
        _BART_NORMS, (Route("attention"), Route("ffn", "final_layer_norm")), kind="Whisper"
    ),
    Family(
        ("encoder_attn_layer_norm", *_BART_NORMS),
        (Route("attention"), Route("cross_attention", None), Route("ffn", "fc1")),
        kind="Bart",
    ),
    Family(_BART_NORMS, (Route("attention"), Route("ffn", "fc1")), kind="Bart"),
)  # fmt: skip
