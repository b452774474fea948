"""The metric catalogue: one definition each, with the same name in file, Python, CLI and report."""

from collections.abc import Iterable
from dataclasses import dataclass

SITE = ("step", "site")
TOP = ("step", "site", "top")
PARAMETER = ("step", "parameter")
WEIGHT = ("weight_step", "parameter")
GROUP = ("step", "group")

BUNDLES: tuple[str, ...] = ("light", "standard", "full")


@dataclass(frozen=True)
class Metric:
    """A named quantity.

    ``name`` is ``group/short``, which is also its dataset in the run file; ``axes`` are its
    dimensions; ``definition`` is the formula in words, ``reading`` one sentence on how to read it
    and what is healthy, ``source`` where it comes from, ``bundle`` the cheapest bundle it is in.
    """

    name: str
    axes: tuple[str, ...]
    unit: str
    definition: str
    reading: str
    source: str
    bundle: str = "standard"

    @property
    def group(self) -> str:
        return self.name.split("/", 1)[0]

    @property
    def short(self) -> str:
        return self.name.split("/", 1)[1]


CURSE = "Curse of Depth, arXiv 2502.05795"
PERI = "Peri-LN, arXiv 2502.02732"
SUN = "Massive Activations, arXiv 2402.17762"
MIX = "Mix-LN, arXiv 2412.13795"
XIONG = "Xiong et al. 2020, arXiv 2002.04745"
DEPTH = "DepthBench, arXiv 2609.32534"
WEIBULL = "Weibull weight magnitudes, arXiv 2605.18898"
OWN = "dynscope"

_ALL: tuple[Metric, ...] = (
    Metric(
        "activation/n_calls", SITE, "calls",
        "training forwards of the site merged into this row",
        "One per micro-batch and use of the module; a jump means that the loop has changed.", OWN,
        "light"),
    Metric(
        "activation/count", SITE, "elements",
        "elements of the site's output merged into this row",
        "Batch times tokens times channels, over all calls of the step.", OWN, "light"),
    Metric(
        "activation/mean", SITE, "model units",
        "mean over all elements of the site's output",
        "Near zero on a healthy residual stream; a drift that grows with depth is energy that "
        "LayerNorm removes and RMSNorm keeps.", CURSE),
    Metric(
        "activation/variance", SITE, "model units squared",
        "population variance about the mean, over all elements of the site's output",
        "On the residual stream of a Pre-LN model it grows with depth; growth that is exponential "
        "rather than linear makes deep blocks close to the identity.", CURSE),
    Metric(
        "activation/rms", SITE, "model units",
        "root mean square over all elements: sqrt(mean squared + variance)",
        "The size of the signal; a smooth curve over depth is healthy, a step names a block.",
        PERI),
    Metric(
        "activation/absmax", SITE, "model units",
        "largest magnitude of any element",
        "Watch it against 65504, where float16 overflows, and against the median.", SUN, "light"),
    Metric(
        "activation/mean_abs", SITE, "model units",
        "mean of the magnitudes",
        "Less moved by outliers than the rms; rms far above it means heavy tails.",
        "BHyT, arXiv 2601.09719"),
    Metric(
        "activation/median_abs", SITE, "model units",
        "median of the magnitudes, from a histogram of at least 2^17 elements taken with a fixed "
        "stride (all elements of smaller tensors); error at most 1 %",
        "The size of a typical element, which a few massive ones cannot move.", SUN),
    Metric(
        "activation/kurtosis", SITE, "1",
        "fourth standardized moment over all elements (3 for a Gaussian)",
        "About 3 is Gaussian; hundreds mean that a few elements carry the energy.",
        "BHyT, arXiv 2601.09719", "full"),
    Metric(
        "activation/zero_fraction", SITE, "fraction",
        "share of elements that are exactly zero",
        "About one half after a ReLU; near one means dead units.", PERI),
    Metric(
        "activation/nonfinite_count", SITE, "elements",
        "number of NaN or infinite elements",
        "Anything but zero is a fault: the first site in depth order is where it enters.", PERI,
        "light"),
    Metric(
        "activation/fp16_overflow_fraction", SITE, "fraction",
        "share of elements with a magnitude above 65504",
        "Zero is healthy; more than zero would be infinite in float16.", PERI, "full"),
    Metric(
        "activation/massive_ratio", SITE, "1",
        "absmax / median_abs; missing when more than half of the elements are zeros",
        "Tens are ordinary, a thousand and more is a massive activation.", SUN),
    Metric(
        "activation/massive_count", SITE, "elements",
        "elements with a magnitude above 100 and at least 1000 times the median of their tensor",
        "Zero in small models; a few per sequence in trained large ones, in fixed channels.", SUN),
    Metric(
        "activation/branch_ratio", SITE, "1",
        "rms of what a sublayer adds over rms of the residual stream it is added to",
        "The share of the stream that a sublayer rewrites; a fall towards zero with depth means "
        "that deep sublayers idle.", "write ratio, llm-internal-medicine"),
    Metric(
        "activation/angular_distance", SITE, "half turns",
        "arccos(cosine of a block's input and output) / pi per token, averaged over tokens",
        "How far a block turns the stream: 0 does nothing, 0.5 is orthogonal; deep blocks near 0 "
        "are the curse of depth.", MIX),
    Metric(
        "activation/cosine_to_input", SITE, "1",
        "cosine of a block's input and output per token, averaged over tokens",
        "One means that the block leaves directions as they are.", MIX, "full"),
    Metric(
        "activation/channel_mean_energy", SITE, "fraction",
        "mean^2 / (mean^2 + variance) over channels per token, averaged over tokens",
        "The energy that LayerNorm removes and RMSNorm keeps; zero means that both coincide.",
        "Pre-RMSNorm, arXiv 2305.14858", "full"),
    Metric(
        "massive/value", TOP, "model units",
        "the three elements of largest magnitude in the site's output, signed; at most one row of "
        "three per step, over all its calls",
        "A massive activation stands orders of magnitude above the median and keeps its channel.",
        SUN),
    Metric(
        "massive/channel", TOP, "index", "channel index of the element (-1: missing)",
        "The same few channels at every step are the mark of massive activations.", SUN),
    Metric(
        "massive/token", TOP, "index",
        "token index inside its own sequence (-1: missing); position 0 is the first token",
        "Often the first token or a delimiter.", SUN),
    Metric(
        "massive/batch", TOP, "index", "index of the sequence in its batch (-1: missing)",
        "All sequences alike means that the value does not depend on the input.", SUN),
    Metric(
        "activation_gradient/n_calls", SITE, "calls",
        "backward passes through the site merged into this row",
        "Equals the forward calls when every use of the site takes part in the loss.", OWN),
    Metric(
        "activation_gradient/rms", SITE, "loss per model unit",
        "root mean square of the gradient with respect to the site's output",
        "Even over depth is healthy; a fall by orders of magnitude means that layers at the small "
        "end learn slowly.", XIONG),
    Metric(
        "activation_gradient/norm", SITE, "loss per model unit",
        "Euclidean norm of the gradient with respect to the site's output",
        "As the rms, times the square root of the number of elements.", DEPTH),
    Metric(
        "activation_gradient/absmax", SITE, "loss per model unit",
        "largest magnitude of the gradient with respect to the site's output",
        "A spike in one block before the loss spikes names the block.", DEPTH),
    Metric(
        "activation_gradient/nonfinite_count", SITE, "elements",
        "NaN or infinite elements of that gradient",
        "Anything but zero is a fault, unless a gradient scaler is looking for its scale.", DEPTH),
    Metric(
        "gradient/norm", PARAMETER, "loss per weight unit",
        "Euclidean norm of the gradient that the optimizer applies: accumulated, unscaled, "
        "reduced, clipped",
        "Compare layers of one role: an even curve over depth trains evenly.", XIONG, "light"),
    Metric(
        "gradient/norm_before_clip", PARAMETER, "loss per weight unit",
        "the same norm when clip_grad_norm_ or clip_grad_value_ was called, or scope.before_clip(), "
        "before clipping",
        "Far above the applied norm means that clipping decides the step size.", MIX),
    Metric(
        "gradient/rms", PARAMETER, "loss per weight unit",
        "root mean square of the gradient that the optimizer applies",
        "As the norm, but comparable between parameters of different sizes.", XIONG),
    Metric(
        "gradient/absmax", PARAMETER, "loss per weight unit",
        "largest magnitude of the gradient that the optimizer applies",
        "A single large element in a small rms is a rare token or a spike.", MIX),
    Metric(
        "gradient/nonfinite_count", PARAMETER, "elements",
        "NaN or infinite elements of the gradient that the optimizer applies",
        "Anything but zero spoils the weights at this step.", OWN),
    Metric(
        "update/norm", PARAMETER, "weight units",
        "Euclidean norm of the change of the weights in one optimizer step, from a fixed sample "
        "of at most 16,384 elements per parameter (all elements in the full bundle)",
        "With Adam it follows the learning rate; a spike comes before the loss spike.",
        "muP practice; marin issue 1368"),
    Metric(
        "update/ratio", PARAMETER, "1",
        "norm of the change over norm of the weights, both on the same elements",
        "About 1e-3 is common early in training; layers far below it idle.",
        "muP practice; marin issue 1368"),
    Metric(
        "optimizer/lr", GROUP, "1", "learning rate of the parameter group",
        "The schedule as it was applied.", OWN, "light"),
    Metric(
        "optimizer/weight_decay", GROUP, "1", "weight decay of the parameter group",
        "Constant unless a schedule changes it.", OWN, "light"),
    Metric(
        "optimizer/beta1", GROUP, "1", "first beta of Adam-like optimizers, or the momentum",
        "Constant unless a schedule changes it.", OWN, "light"),
    Metric(
        "optimizer/beta2", GROUP, "1", "second beta of Adam-like optimizers",
        "Constant unless a schedule changes it.", OWN, "light"),
    Metric(
        "optimizer/eps", GROUP, "1", "epsilon of the optimizer",
        "Gradients far below it are not normalized.", OWN, "light"),
    Metric(
        "weight/norm", WEIGHT, "weight units", "Euclidean norm of the parameter",
        "Slow growth is ordinary without weight decay; a plateau with it.", MIX),
    Metric(
        "weight/rms", WEIGHT, "weight units", "root mean square of the parameter",
        "Comparable between parameters of different sizes.", MIX),
    Metric(
        "weight/absmax", WEIGHT, "weight units", "largest magnitude in the parameter",
        "Outliers here make quantization hard.", OWN),
    Metric(
        "weight/mean", WEIGHT, "weight units",
        "mean of the parameter; the value of a one-element parameter",
        "Near zero for matrices; norm gains start at one.", OWN),
    Metric(
        "weight/weibull_k", WEIGHT, "1",
        "shape of the Weibull distribution fitted to the weight magnitudes, middle 80 % of the "
        "probability plot",
        "1.2054 is Gaussian initialization; trained FFN matrices stay in [1.186, 1.204], "
        "attention's q and k fall below.", WEIBULL),
    Metric(
        "weight/weibull_lambda", WEIGHT, "weight units",
        "scale of the fitted Weibull distribution",
        "0.8875 times the standard deviation for Gaussian weights; it moves with learning rate "
        "and weight decay.", WEIBULL),
    Metric(
        "weight/weibull_r2", WEIGHT, "1", "R squared of the fit",
        "Below 0.95 the shape means little.", WEIBULL),
    Metric(
        "weight/weibull_ks", WEIGHT, "1",
        "largest distance between empirical and fitted distribution (Kolmogorov-Smirnov)",
        "Small is good; a bimodal matrix shows here.", WEIBULL),
    Metric(
        "weight/weibull_n", WEIGHT, "elements",
        "finite magnitudes other than zero that the fit rests on",
        "Bands are read only above a million weights, or pooled over layers.", WEIBULL),
    Metric(
        "weight/weibull_k_standard_error", WEIGHT, "1",
        "standard error of the fitted shape for independent weights",
        "About 0.0014 at a million weights, 0.021 at 4,096: differences below it say nothing.",
        OWN),
    Metric(
        "weight/zero_fraction", WEIGHT, "fraction", "share of weights that are exactly zero",
        "Zero unless something prunes; zeros are left out of the fit.", OWN),
    Metric(
        "weight/nonfinite_count", WEIGHT, "elements",
        "NaN or infinite weights, which norm, rms, absmax, mean and the fit leave out",
        "Anything but zero is a fault.", OWN),
    Metric(
        "weight/q90_q10", WEIGHT, "1", "90 % quantile of the weight magnitudes over the 10 % quantile",
        "13.1 for Gaussian weights, 9 for uniform ones, 21.9 for exponential ones: read it where no "
        "Weibull distribution fits.", WEIBULL, "full"),
    Metric(
        "weight/q99_q50", WEIGHT, "1", "99 % quantile of the weight magnitudes over the median",
        "3.82 for Gaussian weights; more is a heavier tail.", WEIBULL, "full"),
    Metric(
        "weight/q999_q50", WEIGHT, "1", "99.9 % quantile of the weight magnitudes over the median",
        "4.88 for Gaussian weights; far more means outliers.", WEIBULL, "full"),
    Metric(
        "weight/gini", WEIGHT, "1", "Gini coefficient of the weight magnitudes",
        "0.414 for Gaussian weights, 0.333 for uniform ones; towards 1 a few weights hold everything.",
        WEIBULL, "full"),
)  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}


def bundle(name: str) -> tuple[Metric, ...]:
    """The metrics of bundle ``name`` (light, standard or full), each containing the cheaper ones.

    Raises ValueError for an unknown name.
    """
    if name not in BUNDLES:
        raise ValueError(f"unknown bundle {name!r}: choose one of {', '.join(BUNDLES)}")
    allowed = BUNDLES[: BUNDLES.index(name) + 1]
    return tuple(metric for metric in _ALL if metric.bundle in allowed)


def lookup(names: Iterable[str]) -> tuple[Metric, ...]:
    """The catalogue entries called ``names``, in that order. Raises KeyError for an unknown one."""
    return tuple(METRICS[name] for name in names)
