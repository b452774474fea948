"""What is known about the names and classes of modules, as tables that grow: wrappers and roles.

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
    r"(.*_)?heads?|output|classifier|score|logits|unembed|(.*_)?output_projection|proj_out|cls"
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
    Rule("mixer", "block", name="conv", sibling="operator_norm", layer=False, zone="mixer"),  # LFM 2
    # Attention's matrices; also where the block holds them itself.
    Rule("q", "attention", name="q_attn"),  # GPT-2's cross-attention, whose c_attn is k and v
    Rule("other", "attention", name="c_attn", sibling="q_attn"),
    Rule("qkv", "attention", kind=LINEAR, name=r"c_attn|qkv(_proj)?|query_key_value|wqkv|in_proj|w_pack|to_qkv|linear_qkv"),
    Rule("qkv", "block", kind=LINEAR, name="att_proj"),  # OLMo's own names
    Rule("o", "block", kind=LINEAR, name="attn_out"),
    Rule("q", "attention block", kind=LINEAR, name=r"q|wq|q_proj|query(_proj)?|q_lin|to_q|q_a_proj|q_b_proj"),
    Rule("k", "attention block", kind=LINEAR, name=r"k|wk|k_proj|key(_proj)?|k_lin|to_k"),
    Rule("v", "attention block", kind=LINEAR, name=r"v|wv|v_proj|value(_proj)?|v_lin|to_v"),
    Rule("o", "attention block", kind=LINEAR, name=r"o|wo|o_proj|out_proj|out_lin"),
    Rule("o", "attention", kind=LINEAR, name=r"c_proj|dense|proj|out|to_out|linear_proj"),
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
    Rule("in", "ffn block", kind=LINEAR, name=r"linear1|fc1|lin1|c_fc|fc_in|wi|dense_h_to_4h|linear_fc1|ff_proj"),
    Rule("out", "ffn block", kind=LINEAR, name=r"linear2|fc2|lin2|fc_out|dense_4h_to_h|linear_fc2|ff_out"),
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
