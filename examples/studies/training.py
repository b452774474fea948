"""Claims about how far training can be pushed: warm-up, first steps, learning rate, norm removal."""

import itertools
import math
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from examples import coordinate_check
from examples.language_model import Size
from examples.studies.read import last_loss
from examples.studies.runs import FOLDER, RECIPE, SEEDS, run, runs, text
from examples.studies.study import Chart, Curve, Finding, Outcome, spread, verdict
from examples.text import batch
from examples.train import Recipe, loss_of, start


def warm_up() -> Outcome:
    """Post-LN and Pre-LN with and without warm-up, at a learning rate that asks for it."""
    size = Size.of(depth=24, width=64)
    hot = replace(RECIPE, learning_rate=3e-3, steps=200, every=20, validate_every=50)
    losses: dict[str, list[float]] = {}
    for name in ("post_ln", "pre_ln"):
        for share, label in ((0.0, "without"), (0.25, "with")):
            recipe = replace(hot, warm_up=share)
            losses[f"{name} {label}"] = [
                last_loss(run(name, s, size=size, recipe=recipe, label=f"warm-{label}"))
                for s in SEEDS
            ]
    middle = {key: median(each) for key, each in losses.items()}
    post = middle["post_ln without"] - middle["post_ln with"]
    pre = middle["pre_ln without"] - middle["pre_ln with"]
    paper = "Xiong et al., 2002.04745"
    return Outcome(
        [
            Finding(
                paper, "Post-LN needs warm-up",
                f"24 blocks, learning rate 3e-3: loss {spread(losses['post_ln without'])} without, "
                f"{spread(losses['post_ln with'])} with",
                verdict(post > 0.3, post > 0.02),
            ),
            Finding(
                paper, "Pre-LN does not",
                f"loss {spread(losses['pre_ln without'])} without, "
                f"{spread(losses['pre_ln with'])} with",
                verdict(pre < 0.1, pre < post),
            ),
        ]
    )  # fmt: skip


def moved(architecture: str, depth: int, seed: int, steps: int = 30) -> list[float]:
    """How far the outputs are from those at the start, after each of the first steps (rms)."""
    recipe = Recipe(steps=steps, seed=seed)
    model, optimizer = start(architecture, recipe, Size.of(depth=depth, width=64))
    random = torch.Generator().manual_seed(seed)
    seen, _ = batch(text("docs").validation, 8, 64, torch.Generator().manual_seed(7))
    with torch.no_grad():
        before = model(seen)
    distances = []
    for _ in range(steps):
        loss = loss_of(model, *batch(text("docs").train, 8, 64, random))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            distances.append(float((model(seen) - before).square().mean().sqrt()))
    return distances


def model_update() -> Outcome:
    """DeepNet, arXiv 2203.00555: how far the first steps move the model's output."""
    curves, ends = [], {}
    for name, title in (("post_ln", "Post-LN"), ("deepnorm", "DeepNorm")):
        for depth in (6, 24, 48):
            found = [moved(name, depth, seed) for seed in SEEDS]
            middle = [median(each) for each in zip(*found, strict=True)]
            curves.append(Curve(f"{title}, {depth} blocks", list(range(1, 31)), middle))
            ends[name, depth] = [max(each[:10]) for each in found]
    growth = {n: median(ends[n, 48]) / median(ends[n, 6]) for n in ("post_ln", "deepnorm")}
    deep = median(ends["deepnorm", 48]) / median(ends["post_ln", 48])
    return Outcome(
        [
            Finding(
                "Wang et al., 2203.00555",
                "DeepNorm bounds how far the first steps move the output, at any depth",
                "largest rms change of the logits in 10 steps without warm-up, at 6 / 24 / 48 "
                "blocks: "
                + "; ".join(
                    f"{n} " + " / ".join(spread(ends[n, d]) for d in (6, 24, 48))
                    for n in ("deepnorm", "post_ln")
                ),
                verdict(growth["deepnorm"] < 1.5 and deep < 0.8,
                        growth["deepnorm"] < growth["post_ln"] or deep < 1),
            )
        ],
        [Chart("Change of the model's output, median of three seeds", "step", "rms of logits",
               curves, log_y=True)],
    )  # fmt: skip


def unigram_entropy() -> float:
    """Loss in nats of a model that knows how often each byte occurs, and nothing else."""
    counts = torch.bincount(text("docs").train).double()
    p = counts / counts.sum()
    return -float(torch.special.xlogy(p, p).sum())


def ramp(architecture: str, seed: int, size: Size, steps: int, top: float) -> float:
    """The last learning rate of an exponential ramp from top / 1000 to top that is tolerated.

    Tolerated: the loss, averaged over ten steps, is 0.1 nats below what the frequencies of bytes
    alone give. A model that never gets there stagnates (0), one that leaves it and does not come
    back has diverged.
    """
    recipe = Recipe(steps=steps, seed=seed, learning_rate=top)
    model, optimizer = start(architecture, recipe, size)
    random = torch.Generator().manual_seed(seed)
    recent: list[float] = []
    wanted, good = unigram_entropy() - 0.1, 0.0
    for step in range(steps):
        rate = top * 1000 ** (step / (steps - 1) - 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, *batch(text("docs").train, 4, size.context, random))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent = [*recent[-9:], float(loss.detach())]
        if not math.isfinite(recent[-1]):
            break
        if len(recent) == 10 and sum(recent) / 10 < wanted:
            good = rate
    return good


RAMPED = ("post_ln", "deepnorm", "mix_ln", "pre_ln", "keel")


def learning_rate() -> Outcome:
    """Keel, arXiv 2601.19895: the largest tolerable learning rate at 64 blocks."""
    size = Size.of(depth=64, width=32, heads=2, context=32)
    found = {name: [ramp(name, s, size, 300, 0.3) for s in SEEDS] for name in RAMPED}
    middle = [median(found[name]) for name in RAMPED]
    ordered = all(a <= b for a, b in itertools.pairwise(middle))
    weak, strong = max(middle[:3]), min(middle[3:])
    return Outcome(
        [
            Finding(
                "2601.19895, 64 layers",
                "Tolerable learning rates rise in the order Post-LN, DeepNorm, Mix-LN, Pre-LN, Keel",
                "; ".join(f"{name} {spread(found[name], 2)}" for name in RAMPED)
                + " (ramp over 300 steps, width 32; 0: never learned more than the frequencies of bytes)",
                verdict(ordered, strong > weak),
            )
        ],
        [Chart("Largest tolerable learning rate, 64 blocks", "seed", "learning rate",
               [Curve(name, list(SEEDS), found[name]) for name in RAMPED], log_y=True)],
    )  # fmt: skip


def weight_law() -> Outcome:
    """Weibull paper, arXiv 2605.18898: lambda of the weights against sqrt(eta / weight decay)."""
    size = Size.of(depth=4, width=64)
    points: list[tuple[float, float]] = []
    for rate in (1e-3, 3e-3):
        for decay in (0.1, 0.3, 1.0):
            recipe = replace(
                RECIPE, steps=1500, learning_rate=rate, weight_decay=decay, every=100, batch=4
            )
            scales = []
            for seed in SEEDS:
                found = run("pre_ln", seed, size=size, recipe=recipe, label=f"eta{rate}-wd{decay}")
                scale = found["weight/weibull_lambda"][-1]
                scale = scale[np.isin(scale["role"], ["gate", "up", "down"])]
                scales.append(float(scale.median()))
            points.append((math.sqrt(rate / decay), median(scales)))
    x, y = (np.array(each) for each in zip(*points, strict=True))
    slope = float((x * y).sum() / (x * x).sum())
    r = float(np.corrcoef(x, y)[0, 1])
    order = np.argsort(x)
    turned = ", ".join(f"{1500 * a * b:.2g}" for a in (1e-3, 3e-3) for b in (0.1, 0.3, 1.0))
    return Outcome(
        [
            Finding(
                "2605.18898",
                "lambda of trained FFN matrices is about 0.087 sqrt(eta / weight decay), r = 0.94",
                f"{slope:.3f} sqrt(eta / wd), r = {r:.2f} over six settings (T / tau by the peak rate: "
                f"{turned})",
                verdict(r > 0.9 and 0.05 < slope < 0.15, r > 0.5),
            )
        ],
        [Chart("Weibull lambda of the FFN matrices after 1,500 steps", "sqrt(eta / weight decay)",
               "lambda", [Curve("measured", x[order].tolist(), y[order].tolist()),
                          Curve("0.087 x", x[order].tolist(), (0.087 * x[order]).tolist())])],
    )  # fmt: skip


def coordinates() -> Outcome:
    """muP, arXiv 2203.03466, beside Peri-LN: do updates of the logits depend on the width?"""
    found = coordinate_check.check(FOLDER / "coordinates")
    plain, mup = found["peri_ln"], found["mup"]
    return Outcome(
        [
            Finding(
                "Yang et al., 2203.03466; 2506.22403",
                "Under muP (with Peri-LN blocks) the logits move as much at any width",
                f"after 8 steps of Adam at 1e-2, widths 64 to 512: change of the logits' rms grows like "
                f"width^{mup:.2f} under muP, width^{plain:.2f} without",
                verdict(abs(mup) < 0.15 and plain > 0.3, abs(mup) < plain),
            )
        ]
    )


def norm_removal() -> Outcome:
    """LN removal, arXiv 2409.13710: what taking out every norm costs."""
    without, plain = runs("ln_free"), [run("pre_layernorm", seed) for seed in SEEDS]
    gaps = [last_loss(a) - last_loss(b) for a, b in zip(without, plain, strict=True)]
    curves = [
        Curve(title, [float(x) for x in found.scalars("loss")["step"]][::10],
              smooth([float(x) for x in found.scalars("loss")])[::10])
        for title, found in (("norms removed from step 120 on", without[0]), ("Pre-LN", plain[0]))
    ]  # fmt: skip
    return Outcome(
        [
            Finding(
                "Heimersheim, 2409.13710",
                "All norms can be taken out of a GPT during training for about 0.05 nats",
                f"validation loss with every norm removed, above the same model's that keeps them: "
                f"{spread(gaps)} nats. Here the removal is part of a first, short training; the paper "
                "fine-tunes GPT-2",
                verdict(-0.05 < median(gaps) < 0.1, median(gaps) < 0.5),
            )
        ],
        [Chart("Training loss, seed 0", "step", "nats", curves)],
    )


def smooth(values: list[float], over: int = 20) -> list[float]:
    """Running mean of the last values."""
    return [
        sum(values[max(0, i - over + 1) : i + 1]) / min(over, i + 1) for i in range(len(values))
    ]
