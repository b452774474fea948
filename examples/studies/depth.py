"""Claims about curves over depth, read from runs of 12 blocks that were trained for 300 steps."""

from statistics import median

import numpy as np

from dynscope.analysis.depth import growth_law
from examples.studies.read import at_blocks, block_gradient, median_over_seeds
from examples.studies.runs import SEEDS, runs
from examples.studies.study import Chart, Curve, Finding, Outcome, spread, verdict

TITLES = {
    "pre_ln": "Pre-LN",
    "post_ln": "Post-LN",
    "mix_ln": "Mix-LN",
    "peri_ln": "Peri-LN",
    "layernorm_scaling": "LayerNorm Scaling",
    "deepnorm": "DeepNorm",
    "keel": "Keel",
    "gpas": "GPAS",
    "bhyt": "BHyT",
}
BLOCKS = list(range(1, 13))


def variance() -> Outcome:
    """The variance of the residual stream against depth, with the law that fits it."""
    seeds = {a: [at_blocks(run, "activation/variance") for run in runs(a)] for a in TITLES}
    growth = {a: [float(c[-1] / c[0]) for c in curves] for a, curves in seeds.items()}
    middle = {a: median_over_seeds(curves) for a, curves in seeds.items()}
    laws = {a: growth_law(np.arange(12), curve).text for a, curve in middle.items()}

    def said(name: str) -> str:
        return f"last over first block {spread(growth[name])}; {laws[name]}"

    flat = {a: float(np.abs(middle[a] - 1).max()) for a in ("post_ln", "deepnorm", "keel")}
    early = float(np.abs(middle["mix_ln"][:3] - 1).max())
    # LNS: Var between Theta(L) and Theta(L^(2 - eps)): its growth is compared with Pre-LN's.
    pre, lns, _peri, gated, bounded = (
        float(np.median(growth[a]))
        for a in ("pre_ln", "layernorm_scaling", "peri_ln", "gpas", "bhyt")
    )
    ends = {a: float(middle[a][-1]) for a in middle}
    straight = np.corrcoef(BLOCKS, middle["peri_ln"])[0, 1] ** 2
    return Outcome(
        [
            Finding(
                "Xiong et al., 2002.04745; Sun et al., 2502.05795",
                "Pre-LN: the variance grows with depth",
                said("pre_ln"),
                verdict(pre > 5, pre > 1.5),
            ),
            *(
                Finding(paper, f"{TITLES[a]}: every block's output has variance 1", said(a),
                        verdict(flat[a] < 0.05, flat[a] < 0.5))
                for a, paper in (
                    ("post_ln", "Xiong et al., 2002.04745"),
                    ("deepnorm", "Wang et al., 2203.00555"),
                    ("keel", "2601.19895"),
                )
            ),
            Finding(
                "Li et al., 2412.13795",
                "Mix-LN: its Post-LN quarter holds variance 1, the rest grows as Pre-LN",
                f"blocks 1 to 3 at most {early:.2f} from 1; {said('mix_ln')}",
                verdict(early < 0.05 and ends["mix_ln"] > 2, early < 0.2),
            ),
            Finding(
                "Kim et al., 2502.02732",
                "Peri-LN: the variance grows linearly with depth",
                f"R² of a line {straight:.3f}; {said('peri_ln')}",
                verdict(straight > 0.95, straight > 0.8),
            ),
            Finding(
                "Sun et al., 2502.05795",
                "LayerNorm Scaling: the variance grows far slower than in Pre-LN",
                f"{said('layernorm_scaling')} (Pre-LN {pre:.1f})",
                verdict(lns < pre / 2, lns < pre),
            ),
            Finding(
                "Chen et al., 2506.22049",
                "GPAS: the variance of the deep layers is about half of Pre-LN's",
                f"last block {ends['gpas']:.2f}, Pre-LN {ends['pre_ln']:.2f}; {said('gpas')}",
                verdict(ends["gpas"] < 0.67 * ends["pre_ln"], gated < pre),
            ),
            Finding(
                "2601.09719",
                "BHyT: the last block's variance is far below Pre-LN's and below Peri-LN's",
                f"last block {ends['bhyt']:.2f}, Pre-LN {ends['pre_ln']:.2f}, Peri-LN "
                f"{ends['peri_ln']:.2f}; {said('bhyt')}",
                verdict(ends["bhyt"] < min(ends["pre_ln"], ends["peri_ln"]) / 2,
                        bounded < pre and ends["bhyt"] < ends["pre_ln"]),
            ),
        ],
        [
            Chart(
                "Variance of the residual stream after 300 steps, median of three seeds",
                "block",
                "variance",
                [Curve(TITLES[a], BLOCKS, list(curve)) for a, curve in middle.items()],
                log_y=True,
            )
        ],
    )  # fmt: skip


def gradient() -> Outcome:
    """The gradient norm of whole blocks against depth, early and over all of training."""
    names = ("pre_ln", "post_ln", "mix_ln")
    early, late = (
        {a: [block_gradient(run, steps) for run in runs(a)] for a in names}
        for steps in (slice(0, 3), slice(-10, None))
    )
    ratio = {a: [float(c[-1] / c[0]) for c in late[a]] for a in names}
    first = {a: [float(c[-1] / c[0]) for c in early[a]] for a in names}
    uneven = {a: [float(c.max() / c.min()) for c in late[a]] for a in names}
    post, pre = float(np.median(ratio["post_ln"])), float(np.median(first["pre_ln"]))
    mix, plain, last = (float(np.median(uneven[a])) for a in ("mix_ln", "pre_ln", "post_ln"))
    paper = "Li et al., 2412.13795"
    return Outcome(
        [
            Finding(
                paper, "Post-LN: gradients are larger the deeper the block",
                f"last over first block {spread(first['post_ln'])} in the first 20 steps, "
                f"{spread(ratio['post_ln'])} in the last 100",
                verdict(post > 1.5, post > 1.1),
            ),
            Finding(
                paper, "Pre-LN: gradients are smaller the deeper the block",
                f"last over first block {spread(first['pre_ln'])} in the first 20 steps, "
                f"{spread(ratio['pre_ln'])} in the last 100",
                verdict(pre < 0.67, pre < 0.95),
            ),
            Finding(
                paper, "Mix-LN: gradients are more even over depth than in either",
                f"largest over smallest block, last 100 steps: Mix {spread(uneven['mix_ln'])}, Pre "
                f"{spread(uneven['pre_ln'])}, Post {spread(uneven['post_ln'])}",
                verdict(mix < 0.95 * min(plain, last), mix < max(plain, last)),
            ),
        ],
        [
            Chart(
                "Gradient norm of a block's parameters, mean of the last 100 steps",
                "block", "norm",
                [Curve(TITLES[a], BLOCKS, list(median_over_seeds(late[a]))) for a in names],
            ),
            Chart(
                "The same in the first 20 steps", "block", "norm",
                [Curve(TITLES[a], BLOCKS, list(median_over_seeds(early[a]))) for a in names],
            ),
        ],
    )  # fmt: skip


def angle() -> Outcome:
    """How far a block turns its input, against depth."""
    names = ("pre_ln", "post_ln", "mix_ln", "layernorm_scaling")
    seeds = {a: [at_blocks(run, "activation/angular_distance") for run in runs(a)] for a in names}
    # The first block turns a bare embedding: the curse is about the others.
    last = {a: [float(c[-3:].mean() / c[1:4].mean()) for c in seeds[a]] for a in names}
    pre, post, mix, lns = (float(np.median(last[a])) for a in names)
    curves = {a: median_over_seeds(seeds[a]) for a in names}
    deep = {a: float(curves[a][-3:].mean()) for a in names}
    return Outcome(
        [
            Finding(
                "Sun et al., 2502.05795",
                "Pre-LN: deep blocks turn their input less than early ones",
                f"mean of the last three over blocks 2 to 4: {spread(last['pre_ln'])}",
                verdict(pre < 0.8, pre < 1),
            ),
            Finding(
                "Li et al., 2412.13795",
                "Post-LN: it is the early blocks that turn it less",
                f"last three over blocks 2 to 4: {spread(last['post_ln'])}",
                verdict(post > 1.2, post > pre),
            ),
            Finding(
                "Li et al., 2412.13795",
                "Mix-LN: deep blocks turn it more than Pre-LN's",
                f"last three {deep['mix_ln']:.3f}, Pre-LN {deep['pre_ln']:.3f} half turns",
                verdict(deep["mix_ln"] > 1.1 * deep["pre_ln"], mix > pre),
            ),
            Finding(
                "Sun et al., 2502.05795",
                "LayerNorm Scaling: deep blocks turn it more than Pre-LN's",
                f"last three {deep['layernorm_scaling']:.3f}, Pre-LN {deep['pre_ln']:.3f} half "
                f"turns; over blocks 2 to 4 {spread(last['layernorm_scaling'])}",
                verdict(deep["layernorm_scaling"] > 1.1 * deep["pre_ln"], lns > pre),
            ),
        ],
        [
            Chart(
                "Angle between a block's input and output after 300 steps",
                "block",
                "half turns",
                [Curve(TITLES[a], BLOCKS, list(curves[a])) for a in names],
            )
        ],
    )


def mixing() -> Outcome:
    """What the demo says: Pre-LN grows, Mix-LN holds its first quarter, Post-LN's gradients rise."""
    from examples.demo import claims

    pairs = [claims(*both) for both in zip(runs("pre_ln"), runs("mix_ln"), strict=True)]
    return Outcome(
        [
            Finding(
                "Li et al., 2412.13795",
                claim,
                " / ".join(pair[i].text for pair in pairs),
                verdict(
                    all(pair[i].held for pair in pairs),
                    sum(pair[i].held for pair in pairs) > len(SEEDS) / 2,
                ),
            )
            for i, claim in enumerate(
                (
                    "Pre-LN's variance grows more than 5 times over 12 blocks",
                    "Mix-LN's first quarter stays at variance 1",
                    "Mix-LN's gradients fall less over depth than Pre-LN's",
                )
            )
        ]
    )


def weibull() -> Outcome:
    """Weibull k and lambda of the FFN matrices from initialization on."""
    run_ks, run_lambdas, at = [], [], [0.0]
    for run in runs("pre_ln"):
        ffn = run["weight/weibull_k"]
        ffn = ffn[:, np.isin(ffn["role"], ["gate", "up", "down"])]
        scale = run["weight/weibull_lambda"].sel(parameter=ffn["parameter"])
        run_ks.append(np.asarray(ffn.median("parameter"), np.float64))
        run_lambdas.append(np.asarray(scale.median("parameter"), np.float64))
        at = [float(step) for step in run.weight_steps]
    started = [float(k[0]) for k in run_ks]
    sigma = 0.02 * (768 / 128) ** 0.5
    scales = [float(x[0] / sigma) for x in run_lambdas]
    ended = [float(k[-1]) for k in run_ks]
    grown = [float(x[-1] / x[0]) for x in run_lambdas]
    off = max(abs(k - 1.2054) for k in started)
    return Outcome(
        [
            Finding(
                "2605.18898",
                "At initialization k = 1.2054 and lambda = 0.8875 sigma (Gaussian)",
                f"median over 36 FFN matrices: k {spread(started, 5)}, lambda / sigma "
                f"{spread(scales, 4)}",
                verdict(off < 0.005 and abs(median(scales) / 0.8875 - 1) < 0.01, off < 0.02),
            ),
            Finding(
                "2605.18898",
                "FFN matrices stay in the band 1.186 to 1.204 through training",
                f"after 300 steps k {spread(ended, 5)}, lambda {spread(grown)} times what it was. "
                "45,056 weights each: a single one is known to ±0.006",
                verdict(all(1.186 <= k <= 1.204 for k in ended), all(1.15 < k < 1.22 for k in ended)),
            ),
        ],
        [
            Chart("Weibull k of the FFN matrices, median", "step", "k",
                  [Curve(f"seed {s}", at, list(k)) for s, k in zip(SEEDS, run_ks, strict=True)]),
            Chart("Weibull lambda of the FFN matrices, median", "step", "lambda",
                  [Curve(f"seed {s}", at, list(x)) for s, x in zip(SEEDS, run_lambdas, strict=True)]),
        ],
    )  # fmt: skip
