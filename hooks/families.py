"""What is known about model families, as tables that grow: wrappers, roles, residual routes.

A new family usually needs nothing; otherwise one line in one of these tables.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

# Class name of a wrapper -> the attribute that holds what it wraps.
WRAPPERS: dict[str, str] = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
}

# Class name of an adapted layer (PEFT) -> the attribute that holds the layer it adapts.
ADAPTED: dict[str, str] = {"BaseTunerLayer": "base_layer"}


@dataclass(frozen=True)
class Rule:
    """A module has ``role`` if all that is given here fits, and nothing above it in the table did.

    ``zones`` are the places the rule holds in: ``outside`` the blocks, directly in a ``block``, in
    ``attention``, ``ffn``, ``mixer``, ``embed`` or ``head``, among the ``layers`` of a model that
    has no blocks; empty means anywhere. ``name`` must
    match the module's whole name, ``kind`` somewhere in one of its class names, ``sibling`` the
    whole name of a module beside it. ``layer`` asks for a single layer (or for anything but one).
    ``zone`` is the place the rule opens for what lies inside the module.
    """

    role: str
    zones: str = ""
    name: str = ""
    kind: str = ""
    sibling: str = ""
    layer: bool | None = None
    zone: str = ""

    def fits(
        self, zone: str, name: str, kinds: tuple[str, ...], siblings: tuple[str, ...], layer: bool
    ) -> bool:
        return (
            (not self.zones or zone in self.zones.split())
            and (self.layer is None or self.layer == layer)
            and (not self.name or _match(self.name, name))
            and (not self.kind or any(re.search(self.kind, kind) for kind in kinds))
            and (not self.sibling or any(_match(self.sibling, other) for other in siblings))
        )


def _match(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern, name, re.IGNORECASE) is not None


LINEAR = r"Linear|^Conv1D$"
_NORM_NAME = r"(.*_)?(norm|layer_?norm|ln)(_.*|\d*)"
_ATTENTION_NAME = r"(self_?)?(attn|attention)\d*|att|mha|(global|local|linear)_attn"
_CROSS_NAME = r"encoder_attn|cross_?attn|cross_?attention|encdecattention|multihead_attn|attn2"
_FFN_NAME = r"mlp\d*|ffn|feed_?forward|ff|moe|block_sparse_moe|densereludense"
_FFN_KIND = r"MLP|Mlp|FeedForward|FFN|SwiGLU|MoE|MoeBlock|DenseActDense|DenseGatedActDense"
_HEAD_NAME = (
    r"(.*_)?heads?|classifier|score|logits|unembed|(.*_)?output_projection|proj_out|cls"
    r"|(visual|text)_projection|qa_outputs|generator|to_logits"
)

RULES: tuple[Rule, ...] = (
    # Adapters first: they sit inside the layer they adapt and would be taken for it.
    Rule("adapter", name=r"lora_(a|b|embedding_a|embedding_b)", zone="adapter"),
    Rule("adapter", "adapter", kind=LINEAR + "|Embedding|Conv", layer=True),
    # Layers known by their class wherever they are.
    Rule("norm", kind=r"Norm|^DyT|DynamicTanh", layer=True),
    Rule("norm", name=_NORM_NAME, layer=True),
    Rule("dropout", kind=r"Dropout|DropPath|StochasticDepth"),
    Rule("dropout", name=r"drop(out|_path)?\d*", layer=True),
    Rule("pool", kind=r"Pool\dd$|^Pool", layer=True),
    Rule(
        "activation",
        kind=r"ReLU|GELU|Gelu|SiLU|^Swish|^Mish|Sigmoid|^Tanh|Softmax|^C?ELU|SELU|^GLU|Softplus"
        r"|Softsign|Hardswish|Hardtanh|Activation$",
        layer=True,
    ),
    Rule("activation", name=r"act|(.*_)?act_fn|activation(_fn)?", layer=True),
    # T5 adds the residual inside the module around each sublayer; the sublayer is one further in.
    Rule("other", "block", kind=r"Layer(SelfAttention|CrossAttention|FF)$", zone="block"),
    # Sublayers of a block. BERT's FFN is two modules, of which the second gives its output.
    Rule("cross_attention", "block layers", name=_CROSS_NAME, zone="attention"),
    Rule("cross_attention", "block layers", kind=r"CrossAttention", zone="attention"),
    Rule("attention", "block layers", name=_ATTENTION_NAME, zone="attention"),
    Rule("attention", "block layers", kind=r"Attention|Attn", zone="attention"),
    Rule("ffn", "block", name="output", sibling="intermediate", zone="ffn"),
    Rule("other", "block", name="intermediate", sibling="output", zone="ffn"),
    Rule("in", "block", name="ffn", sibling="ffn_output"),  # ALBERT
    Rule("out", "block", name="ffn_output"),
    Rule("ffn", "block", name=_FFN_NAME, zone="ffn"),
    Rule("ffn", "block", kind=_FFN_KIND, zone="ffn"),
    Rule("mixer", "block layers", name=r"mixer|mamba|ssm|ssd|recurrent|temporal_block", zone="mixer"),
    Rule("mixer", "block layers", kind=r"Mixer$|ShortConv$|^Mamba\d?$|SSM|^RNN|LSTM$|GRU$", zone="mixer"),
    # Attention's matrices; also where the block holds them itself.
    Rule("q", "attention", name="q_attn"),  # GPT-2's cross-attention, whose c_attn is k and v
    Rule("other", "attention", name="c_attn", sibling="q_attn"),
    Rule("qkv", "attention", kind=LINEAR, name=r"c_attn|qkv(_proj)?|query_key_value|wqkv|in_proj|w_pack|to_qkv|att_proj"),
    Rule("q", "attention block", kind=LINEAR, name=r"q|wq|q_proj|query(_proj)?|q_lin|to_q|q_a_proj|q_b_proj"),
    Rule("k", "attention block", kind=LINEAR, name=r"k|wk|k_proj|key(_proj)?|k_lin|to_k"),
    Rule("v", "attention block", kind=LINEAR, name=r"v|wv|v_proj|value(_proj)?|v_lin|to_v"),
    Rule("o", "attention block", kind=LINEAR, name=r"o|wo|o_proj|out_proj|out_lin"),
    Rule("o", "attention", kind=LINEAR, name=r"c_proj|dense|proj|out|to_out"),
    # Mixtures of experts: the router is called `gate` too, but has the experts beside it.
    Rule("router", "ffn", name=r"gate|router|wg", sibling="experts"),
    Rule("router", "ffn", name=r"router|shared_expert_gate", kind=LINEAR + "|Router"),
    Rule("experts", "ffn", name=r"experts|shared_experts?|shared_mlp", zone="ffn"),
    # The FFN's matrices, gated and plain.
    Rule("gate", "ffn", kind=LINEAR, name=r"gate(_proj)?|wi_0|w_gate"),
    Rule("up", "ffn", kind=LINEAR, name=r"up(_proj)?|wi_1|w_up"),
    Rule("down", "ffn", kind=LINEAR, name=r"down(_proj)?|w_down"),
    Rule("gate", "ffn", kind=LINEAR, name="w1", sibling="w3"),
    Rule("up", "ffn", kind=LINEAR, name="w3", sibling="w1"),
    Rule("down", "ffn", kind=LINEAR, name="w2", sibling="w3"),
    Rule("down", "ffn", kind=LINEAR, name="wo", sibling="wi_0"),
    Rule("gate_up", "ffn", kind=LINEAR, name=r"gate_up(_proj)?|w12"),
    Rule("in", "ffn block", kind=LINEAR, name=r"linear1|fc1|lin1|c_fc|fc_in|wi|dense_h_to_4h"),
    Rule("out", "ffn block", kind=LINEAR, name=r"linear2|fc2|lin2|fc_out|dense_4h_to_h"),
    Rule("out", "ffn", kind=LINEAR, name=r"c_proj|wo"),
    Rule("in", "mixer", kind=LINEAR, name=r"in_proj|wi"),
    Rule("out", "mixer", kind=LINEAR, name=r"out_proj|wo"),
    # Before and after the blocks.
    Rule("other", kind=r"Rotary"),
    Rule("pool", "outside", name=r"pooler", zone="pool"),
    Rule("embed", "outside embed layers", name=r".*embed.*|wte|wpe|shared|(tok|pos|patch)_.*", zone="embed"),
    Rule("embed", "outside embed layers", name=r"(cls|class|mask|dist|register|storage)_tokens?"),
    Rule("embed", "outside embed layers", kind=r"Embed", zone="embed"),
    Rule("head", "outside", name=_HEAD_NAME, zone="head"),
    Rule("head", "layers", name=_HEAD_NAME, layer=True),
    Rule("embed", "embed", layer=True, kind=LINEAR + "|Embed|^Conv"),
    Rule("head", "head", layer=True, kind=LINEAR),
    Rule("head", "head", layer=False),
    Rule("pool", "pool", layer=True, kind=LINEAR),
    Rule("conv", kind=r"^_ConvNd$|^Conv(Transpose)?\dd$", layer=True),
)  # fmt: skip


@lru_cache(maxsize=4096)
def rule_for(
    zone: str, name: str, kinds: tuple[str, ...], siblings: tuple[str, ...] = (), layer: bool = True
) -> Rule | None:
    """The first rule of the table that fits a module."""
    return next((rule for rule in RULES if rule.fits(zone, name, kinds, siblings, layer)), None)


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
