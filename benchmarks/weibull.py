"""How fast and how exact the Weibull fits are: python benchmarks/weibull.py [--rounds 5]

Three tables, all in one process on as many threads as torch takes: time of one matrix against the
published binned protocol (npm-weibull-py's own code where it is installed, otherwise our
reproduction of it), error of k against sorting every weight, and time of a whole model's weights step.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch

from dynscope import weibull
from dynscope.hooks import weights


def milliseconds(*work: Callable[[], object], rounds: int) -> list[float]:
    """Median time of each piece of work, the pieces taking turns."""
    times: list[list[float]] = [[] for _ in work]
    for _ in range(rounds):
        for piece, spent in zip(work, times, strict=True):
            start = time.perf_counter()
            piece()
            spent.append(1e3 * (time.perf_counter() - start))
    return [median(spent) for spent in times]


def protocol() -> tuple[str, Callable[[torch.Tensor], object]]:
    try:
        from npm_weibull import (
            extract_to_histogram,
            weibull_fit,
        )
    except ImportError:
        return "binned (ours)", lambda tensor: weibull.fit(tensor.numpy(), method="binned")
    return "npm-weibull-py", lambda tensor: weibull_fit(extract_to_histogram(tensor))


def fit_whole(tensor: torch.Tensor) -> float:
    row = weibull.derive(weights.collect([("w", tensor)]))
    return float(row["weight/weibull_k"][0])


def speed(rounds: int) -> None:
    name, peer = protocol()
    print(f"{'one matrix, ms':22}{'dynscope':>12}{'in trainer':>12}{name:>16}{'ratio':>8}")
    for side in (512, 1024, 4096):
        tensor = 0.02 * torch.randn(side, side)
        ours, taken, theirs = milliseconds(
            partial(fit_whole, tensor),
            partial(weights.collect, [("w", tensor)]),
            partial(peer, tensor),
            rounds=rounds,
        )
        label = f"{side} x {side} float32"
        print(f"{label:22}{ours:12.2f}{taken:12.2f}{theirs:16.2f}{ours / theirs:8.2f}")


def accuracy() -> None:
    generator = np.random.default_rng(0)
    shapes = {
        "normal": generator.standard_normal(10**6),
        "uniform": generator.random(10**6),
        "exponential": generator.standard_exponential(10**6),
        "Student t3": generator.standard_t(3, 10**6),
        "normal around 1": 1 + 0.1 * generator.standard_normal(10**6),
    }
    scales = (1.0, 0.02, 0.013, 0.165)
    print(
        f"\n{'10^6 weights, 4 scales':22}{'k':>10}{'std. error':>12}{'counted':>12}{'binned':>12}"
    )
    for name, values in shapes.items():
        arrays = [(values * scale).astype(np.float32) for scale in scales]
        exact = [weibull.fit(array) for array in arrays]
        counted = [fit_whole(torch.from_numpy(array).reshape(1000, 1000)) for array in arrays]
        binned = [weibull.fit(array, method="binned").k for array in arrays]
        worst = [
            max(abs(k - fit.k) for k, fit in zip(found, exact, strict=True))
            for found in (counted, binned)
        ]
        error = exact[0].k_stderr
        print(f"{name:22}{exact[0].k:10.5f}{error:12.5f}{worst[0]:12.1e}{worst[1]:12.1e}")


def model(rounds: int) -> None:
    shapes = [(4096, 384), (256, 384)] + 12 * [(1152, 384), (384, 384), (1536, 384), (384, 1536)]
    for dtype in (torch.float32, torch.bfloat16):
        parameters = [(f"w{i}", torch.randn(shape).to(dtype)) for i, shape in enumerate(shapes)]
        numel = sum(tensor.numel() for _, tensor in parameters)
        arrays = weights.collect(parameters)
        taken, derived = milliseconds(
            partial(weights.collect, parameters), partial(weibull.derive, arrays), rounds=rounds
        )
        size = sum(values.nbytes for values in arrays.values()) / 2**20
        print(
            f"\n{len(parameters)} matrices, {numel / 1e6:.1f} M {str(dtype)[6:]} weights: "
            f"{taken:.0f} ms in the trainer, {size:.1f} MiB over the pipe, {derived:.0f} ms in the writer"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    speed(rounds)
    accuracy()
    model(rounds)


if __name__ == "__main__":
    main()
