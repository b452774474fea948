"""Depth curves of a recorded run, as arrays over its blocks."""

import numpy as np
from numpy.typing import NDArray

import dynscope

Blocks = NDArray[np.float64]


def at_blocks(run: dynscope.Run, metric: str, step: int = -1) -> Blocks:
    """A metric of every block's output at a recorded step, counted from the first or the last."""
    values = run[metric][step]
    return np.asarray(values[values["role"] == "block"].sortby("depth"), np.float64)


def block_gradient(run: dynscope.Run, steps: slice = slice(None)) -> Blocks:
    """Norm of the gradient of all parameters of each block together, mean over steps."""
    squares = run["gradient/norm"][steps] ** 2
    blocks = squares[:, squares["depth"] >= 0].groupby("depth").sum("parameter")
    return np.asarray((blocks**0.5).mean("step"), np.float64)


def median_over_seeds(curves: list[Blocks]) -> Blocks:
    return np.median(np.stack(curves), axis=0)


def last_loss(run: dynscope.Run, name: str = "validation_loss") -> float:
    return float(run.scalars(name)[-1])
