"""Every architecture by name."""

from collections.abc import Callable, Iterable
from typing import Any

from examples import (
    attn_res,
    bhyt,
    deepnorm,
    deepscale_lm,
    depth_graft,
    dyt,
    gpas,
    hyper_connections,
    keel,
    layernorm_scaling,
    linear_depth_memory,
    ln_free,
    mhc,
    mix_ln,
    mup,
    peri_ln,
    post_ln,
    pre_ln,
    pre_rmsnorm,
)
from examples.language_model import LanguageModel, Size

ARCHITECTURES: dict[str, Callable[[Size], LanguageModel]] = {
    "pre_ln": pre_ln.build,
    "post_ln": post_ln.build,
    "mix_ln": mix_ln.build,
    "peri_ln": peri_ln.build,
    "layernorm_scaling": layernorm_scaling.build,
    "gpas": gpas.build,
    "gpas_sandwich": gpas.build_sandwich,
    "gpas_deepnorm": gpas.build_deepnorm,
    "gpas_mix": gpas.build_mix,
    "deepnorm": deepnorm.build,
    "keel": keel.build,
    "deepscale_lm": deepscale_lm.build,
    "pre_layernorm": pre_rmsnorm.build_layer_norm,
    "pre_rmsnorm": pre_rmsnorm.build,
    "pre_crmsnorm": pre_rmsnorm.build_compressed,
    "dyt": dyt.build,
    "bhyt": bhyt.build,
    "bhyt_exact": bhyt.build_exact,
    "hyper_connections": hyper_connections.build,
    "mhc": mhc.build,
    "attn_res": attn_res.build,
    "attn_res_block": attn_res.build_block,
    "ln_free": ln_free.build,
    "mup": mup.build,
    "linear_depth_memory": linear_depth_memory.build,
    "depth_graft": depth_graft.build,
}

PARAMETER_GROUPS: dict[str, Callable[[LanguageModel, float], Iterable[dict[str, Any]]]] = {
    "mup": mup.parameter_groups,
}
"""Where the optimizer's settings belong to the idea: of the model and the learning rate."""

STREAMS = {name: (hyper_connections.STREAMS, 0) for name in ("hyper_connections", "mhc")}
"""How many residual streams a block's output holds, and along which axis, where there are several."""

BEFORE_STEP: dict[str, Callable[[LanguageModel, float], None]] = {
    "ln_free": ln_free.before_step,
}
"""Where training changes the model as it goes: called with the progress, from 0 to 1."""
