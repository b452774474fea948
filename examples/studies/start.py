"""Claims about a network as it is initialized: nothing is trained here."""

import itertools
import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from examples import moments, peri_ln, pre_rmsnorm, xiong
from examples.language_model import Size
from examples.studies.study import Chart, Curve, Finding, Outcome, spread, verdict

SEEDS = range(8)


def gradients() -> Outcome:
    """Xiong et al., arXiv 2002.04745, Theorem 1: the last layer's gradient against depth."""
    depths = (4, 8, 16, 32)
    norms = {
        post: [[xiong.last_gradient(256, d, s, post=post) for s in SEEDS] for d in depths]
        for post in (False, True)
    }
    middle = {post: [median(each) for each in norms[post]] for post in norms}
    scaled = [x * d**0.5 for x, d in zip(middle[False], depths, strict=True)]
    pre, post = (max(x) / min(x) for x in (scaled, middle[True]))
    falls = middle[False][0] / middle[False][-1]
    paper = "Xiong et al., 2002.04745, theorem 1"
    return Outcome(
        [
            Finding(
                paper,
                "Pre-LN: the gradient of the last FFN falls as 1/sqrt(L)",
                f"L = 4 to 32: it falls {falls:.2f} times (sqrt(8) = 2.83); times sqrt(L) it stays "
                f"within a factor {pre:.2f}",
                verdict(pre < 1.2, falls > 1.5),
            ),
            Finding(
                paper,
                "Post-LN: the gradient of the last FFN does not depend on the depth",
                f"L = 4 to 32: {', '.join(spread(each) for each in norms[True])}",
                verdict(post < 1.4, post < falls),
            ),
        ],
        [
            Chart(
                "Gradient of the last FFN's second matrix at initialization",
                "layers",
                "Frobenius norm",
                [Curve("Pre-LN", depths, middle[False]), Curve("Post-LN", depths, middle[True])],
                log_x=True,
                log_y=True,
            )
        ],
    )


@torch.no_grad()
def hidden_norms() -> Outcome:
    """Xiong et al., Lemma 2: the mean square of the hidden state against depth."""
    layers, width = 16, 256
    found = torch.zeros(2, layers, len(SEEDS))
    for seed in SEEDS:
        torch.manual_seed(seed)
        for post in (False, True):
            x = torch.randn(16, 16, width)
            for number, block in enumerate(xiong.Encoder(width, layers, post=post).blocks):
                assert isinstance(block, xiong.Block)
                found[int(post), number, seed] = block.before_last_norm(x).square().mean()
                x = block(x)
    depth = torch.arange(1, layers + 1)
    pre, post_ln = found.median(2).values
    within = bool((1 + depth / 2 < pre).all() and (pre < 1 + 3 * depth / 2).all())
    off = float((post_ln / 1.5 - 1).abs().max())
    paper = "Xiong et al., 2002.04745, lemma 2"
    axis = depth.tolist()
    return Outcome(
        [
            Finding(
                paper,
                "Pre-LN: 1 + l/2 <= E|x|²/d <= 1 + 3l/2 after layer l",
                f"after layer 16: {spread(found[0, -1].tolist())}, between 9 and 25; "
                f"{'all' if within else 'not all'} layers within",
                verdict(within, bool(pre[-1] > 4)),
            ),
            Finding(
                paper,
                "Post-LN: E|x|²/d = 3/2 in front of each layer's last norm",
                f"{spread(post_ln.tolist())} over 16 layers, at most {100 * off:.0f} % off",
                verdict(off < 0.1, off < 0.3),
            ),
        ],
        [
            Chart(
                "Mean square of the hidden state at initialization",
                "layer",
                "E|x|² / d",
                [
                    Curve("Pre-LN", axis, pre.tolist()),
                    Curve("upper bound", axis, (1 + 1.5 * depth).tolist()),
                    Curve("lower bound", axis, (1 + 0.5 * depth).tolist()),
                    Curve("Post-LN, before its last norm", axis, post_ln.tolist()),
                ],
            )
        ],
    )


@torch.no_grad()
def peri() -> Outcome:
    """Peri-LN, arXiv 2502.02732: every sublayer adds variance 1 at initialization."""
    size = Size.of(depth=24, width=256)
    curves = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = peri_ln.build(size)
        assert model.enter is not None
        x = model.enter(model.embed(torch.randint(256, (8, 64))))
        squares = [float(x.square().mean())]
        for block in model.blocks:
            x = block(x)
            squares.append(float(x.square().mean()))
        curves.append(squares)
    middle = [median(each) for each in zip(*curves, strict=True)]
    steps = [b - a for a, b in itertools.pairwise(middle)]
    straight = max(abs(step - 2) for step in steps)
    return Outcome(
        [
            Finding(
                "Kim et al., 2502.02732",
                "Peri-LN: the stream's variance grows linearly, by 2 per block at initialization",
                f"per block {spread(steps)} over 24 blocks; after the last one {middle[-1]:.1f} (49)",
                verdict(straight < 0.2, straight < 1),
            )
        ],
        [Chart("Peri-LN at initialization", "block", "mean square of the stream",
               [Curve("measured", list(range(25)), middle),
                Curve("1 + 2 l", list(range(25)), [1 + 2 * i for i in range(25)])])],
    )  # fmt: skip


def moment_rules() -> Outcome:
    """DeepScaleLM, arXiv 2403.09635: predicted moments beside simulated ones."""
    torch.manual_seed(0)
    rows: list[tuple[str, float, float, float]] = []  # name, predicted, measured, band (99 %)
    for variance, r in ((0.25, 0.2), (1.0, 0.2), (1.0, 0.7), (4.0, 0.7)):
        shape = (20_000, 128)
        shared = torch.randn(shape) * (r * variance) ** 0.5
        x, y = (shared + torch.randn(shape) * ((1 - r) * variance) ** 0.5 for _ in range(2))
        given = moments.Moments(0.0, variance, r * variance)
        w = torch.randn(256, 128) * 0.1
        linear, relu = moments.linear(given, 128, 0.01), moments.relu(given)
        rows += [
            ("linear variance", linear.variance, var(x @ w.T), 0.028),
            ("ReLU variance", relu.variance, var(x.relu()), 0.034),
            ("ReLU covariance", relu.covariance, cov(x.relu(), y.relu()), 0.034),
            ("GELU variance", moments.gelu(given).variance, var(nn.functional.gelu(x)), 0.013),
        ]
    errors = {row[0]: 0.0 for row in rows}
    for name, predicted, measured, _ in rows:
        errors[name] = max(errors[name], abs(measured / predicted - 1))
    inside = all(errors[name] <= band for name, _, _, band in rows)
    return Outcome(
        [
            Finding(
                "Kedia et al., 2403.09635",
                "Closed forms give a layer's output moments from its input's",
                "largest relative error over four inputs: "
                + ", ".join(f"{name} {100 * error:.2g} %" for name, error in errors.items())
                + f"; {'all' if inside else 'not all'} within the paper's 99 % bands",
                verdict(inside, max(errors.values()) < 0.1),
            )
        ]
    )


def var(x: Tensor) -> float:
    return float(x.var(correction=0))


def cov(x: Tensor, y: Tensor) -> float:
    return float((x * y).mean() - x.mean() * y.mean())


def rms_norm() -> Outcome:
    """Pre-RMSNorm, arXiv 2305.14858: exactly the Pre-LN model, and how much faster."""
    size = Size.of(depth=6, width=256)
    seen = torch.randint(256, (8, 64))
    models = []
    for convert in (lambda m: m, pre_rmsnorm.rms, pre_rmsnorm.compress):
        torch.manual_seed(0)
        models.append(convert(pre_rmsnorm.build_layer_norm(size).double()))
    with torch.no_grad():
        outputs = [model(seen) for model in models]
        off = max(float((out - outputs[0]).abs().max()) for out in outputs)
        for writer, _ in pre_rmsnorm.writers(models[1]):
            parametrize.remove_parametrizations(writer, "weight")  # centred once and for all
        times = alternating([model.float() for model in models], seen)
    plain = [t[0] for t in times]
    ratios = [[t[i] / base for t, base in zip(times, plain, strict=True)] for i in (1, 2)]
    faster = median(ratios[0]) < 1
    return Outcome(
        [
            Finding(
                "Jiang et al., 2305.14858",
                "Pre-LN, Pre-RMSNorm and Pre-CRMSNorm are the same function",
                f"outputs differ by at most {off:.1e} in float64",
                verdict(off < 1e-9, off < 1e-4),
            ),
            Finding(
                "Jiang et al., 2305.14858",
                "Pre-RMSNorm and Pre-CRMSNorm are 1 to 10 % faster",
                f"time of a forward, over LayerNorm's: RMSNorm {spread(ratios[0])}, CRMSNorm "
                f"{spread(ratios[1])} (40 rounds). LayerNorm is one fused kernel here, CRMSNorm is "
                "written in PyTorch operations",
                verdict(0.9 <= median(ratios[0]) <= 0.99, faster),
            ),
        ]
    )


def alternating(models: list[nn.Module], seen: Tensor, rounds: int = 40) -> list[list[float]]:
    """Seconds of a forward of each model, turn by turn."""
    times = []
    for _ in range(rounds):
        now = []
        for model in models:
            started = time.perf_counter()
            model(seen)
            now.append(time.perf_counter() - started)
        times.append(now)
    return times
