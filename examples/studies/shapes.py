"""Width against depth at one number of parameters, and a thousand blocks."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from examples.language_model import Size
from examples.studies.depth import TITLES
from examples.studies.read import at_blocks, last_loss
from examples.studies.runs import RECIPE, run
from examples.studies.study import Chart, Curve, Finding, Outcome, verdict

ARCHITECTURES = (
    "pre_ln", "peri_ln", "layernorm_scaling", "deepnorm", "keel",
    "hyper_connections", "mhc", "attn_res",
)  # fmt: skip
SHAPES = {4: 144, 8: 104, 16: 72, 32: 48}
"""Blocks and width of about a million parameters outside embedding and head."""


def named(architecture: str) -> str:
    others = {"hyper_connections": "Hyper-connections", "mhc": "mHC", "attn_res": "AttnRes"}
    return TITLES.get(architecture) or others[architecture]


def shaped(depth: int) -> Size:
    return Size.of(depth=depth, width=SHAPES[depth], heads=2 if SHAPES[depth] % 8 else 4)


def deep_share(angles: Sequence[float]) -> float:
    """Mean angle of the last quarter of the blocks over that of all: how much the deep ones do."""
    quarter = max(1, len(angles) // 4)
    return float(np.mean(angles[-quarter:]) / np.mean(angles))


def shapes() -> Outcome:
    """DepthBench, arXiv 2609.32534: is depth worth its width? One seed."""
    recipe = replace(RECIPE, every=30, steps=150, batch=4)
    losses: dict[str, list[float]] = {}
    use: dict[str, list[float]] = {}
    for name in ARCHITECTURES:
        for depth in SHAPES:
            found = run(name, 0, size=shaped(depth), recipe=recipe, label=f"shape{depth}")
            losses.setdefault(name, []).append(last_loss(found))
            angles = at_blocks(found, "activation/angular_distance")
            use.setdefault(name, []).append(deep_share(list(angles)))
    worse = {name: each[-1] - each[1] for name, each in losses.items()}
    plain, best = worse["pre_ln"], min(worse, key=lambda name: worse[name])
    multi = median([worse["hyper_connections"], worse["attn_res"]])
    said = "; ".join(
        f"{named(name)} " + " / ".join(f"{loss:.3f}" for loss in losses[name]) for name in losses
    )
    return Outcome(
        [
            Finding(
                "2609.32534",
                "Pre-LN gets worse as depth replaces width",
                f"validation loss at L = 4 / 8 / 16 / 32: {said}",
                verdict(plain > 0.01, plain > 0),
            ),
            Finding(
                "2609.32534",
                "Hyper-connections and AttnRes make better use of depth than Pre-LN",
                f"loss at L = 32 less that at L = 8: Pre-LN {plain:+.3f}, hyper-connections "
                f"{worse['hyper_connections']:+.3f}, AttnRes {worse['attn_res']:+.3f}; best "
                f"{named(best)} {worse[best]:+.3f}",
                verdict(multi < plain - 0.01, multi < plain),
            ),
        ],
        [
            Chart("Validation loss after 150 steps, about a million parameters", "blocks", "nats",
                  [Curve(named(n), list(SHAPES), losses[n]) for n in losses], log_x=True),
            Chart("Angle of the last quarter of the blocks over the mean of all", "blocks", "ratio",
                  [Curve(named(n), list(SHAPES), use[n]) for n in use], log_x=True),
        ],
    )  # fmt: skip


THOUSAND = ("keel", "deepnorm", "pre_ln", "post_ln")


def thousand() -> Outcome:
    """A thousand blocks, width 16: who survives? One seed."""
    size = Size.of(depth=1000, width=16, heads=2, context=32)
    recipe = replace(RECIPE, steps=60, batch=4, every=10, validate_every=60, learning_rate=1e-3)
    start = math.log(256)
    curves, ends, seconds = [], {}, time.perf_counter()
    for name in THOUSAND:
        found = run(name, 0, size=size, recipe=recipe, label="thousand")
        losses = [float(x) for x in found.scalars("loss")]
        curves.append(Curve(TITLES[name], list(range(1, len(losses) + 1)), losses))
        ends[name] = float(np.mean(losses[-10:]))
    learned = {name: math.isfinite(loss) and loss < start - 1 for name, loss in ends.items()}
    said = "; ".join(f"{TITLES[name]} {loss:.2f}" for name, loss in ends.items())
    minutes = (time.perf_counter() - seconds) / 60
    return Outcome(
        [
            Finding(
                "2203.00555; 2601.19895",
                "DeepNorm and Keel train at 1,000 blocks, Post-LN does not",
                f"mean loss of the last 10 of 60 steps (ln 256 = {start:.2f}): {said}; trained in "
                f"{minutes:.0f} min",
                verdict(
                    learned["keel"] and learned["deepnorm"] and not learned["post_ln"],
                    ends["post_ln"] > min(ends["keel"], ends["deepnorm"]),
                ),
            )
        ],
        [Chart("Training loss at 1,000 blocks", "step", "nats", curves)],
    )
