"""How fast and how exact the Weibull fits are: python -m benchmarks.weibull [--rounds 15]

Everything in one process, the pieces taking turns, medians of many. One matrix: `dynscope.weibull.fit`,
what a recorded training does (the training process's part alone), npm-weibull-py 0.4.0, and reading the
memory once, and the fit without numba. Then the error of k against sorting every weight, the weights
step of a whole model, and all matrices of SmolLM2-135M.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import torch
from npm_weibull import extract_to_histogram, weibull_fit

from dynscope import weibull
from dynscope.hooks.training import weights
from dynscope.weibull import loops


def milliseconds(*work: Callable[[], object], rounds: int) -> list[float]:
    """Median time of each piece of work, the pieces taking turns."""
    times: list[list[float]] = [[] for _ in work]
    for _ in range(rounds):
        for piece, spent in zip(work, times, strict=True):
            start = time.perf_counter()
            piece()
            spent.append(1e3 * (time.perf_counter() - start))
    return [median(spent) for spent in times]


def npm(tensor: torch.Tensor) -> float:
    return float(weibull_fit(extract_to_histogram(tensor))["k"])


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The same memory; numpy has no bfloat16 of its own."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def fit_whole(tensor: torch.Tensor) -> float:
    """What a recorded training and its writer process do together."""
    row = weibull.derive(weights.collect([("w", tensor)]))
    return float(row["weight/weibull_k"][0])


def read_once(array: np.ndarray[Any, Any]) -> object:
    return np.bitwise_or.reduce(array.reshape(-1).view(np.uint32))


def without_numba(array: np.ndarray[Any, Any]) -> weibull.WeibullFit:
    with patch.object(loops, "compiled", lambda: None):
        return weibull.fit(array)


def speed(rounds: int) -> None:
    heads = ("dynscope", "no numba", "in trainer", "npm-weibull", "read once", "ratio", "no numba")
    print(f"{'one matrix, ms':22}" + "".join(f"{head:>12}" for head in heads))
    for dtype in (torch.float32, torch.bfloat16):
        for side in (64, 128, 180, 256, 512, 940, 1024, 4096):
            tensor = (0.02 * torch.randn(side, side)).to(dtype)
            array = as_numpy(tensor)
            ours, plain, taken, theirs, reading = milliseconds(
                partial(weibull.fit, array), partial(without_numba, array),
                partial(weights.collect, [("w", tensor)]), partial(npm, tensor),
                partial(read_once, array), rounds=max(rounds, min(300, 40_000_000 // side**2)),
            )  # fmt: skip
            cells = "".join(f"{one:12.3f}" for one in (ours, plain, taken, theirs, reading))
            name = f"{side} x {side} {str(dtype)[6:]}"
            print(f"{name:22}{cells}{ours / theirs:12.2f}{plain / theirs:12.2f}")


def by_sorting(array: np.ndarray[Any, Any]) -> weibull.WeibullFit:
    levels, counts = np.unique(np.abs(array), return_counts=True)
    return weibull.fit(weibull.Histogram.of_counts(levels, counts))


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
    heads = ("std. error", "fit", "in a run", "binned")
    print(f"\n{'10^6 weights, 4 scales':22}{'k':>10}" + "".join(f"{head:>12}" for head in heads))
    for name, values in shapes.items():
        arrays = [(values * scale).astype(np.float32) for scale in scales]
        exact = [by_sorting(array) for array in arrays]
        own = [weibull.fit(array).k for array in arrays]
        counted = [fit_whole(torch.from_numpy(array).reshape(1000, 1000)) for array in arrays]
        binned = [weibull.fit(array, method="binned").k for array in arrays]
        worst = [
            max(abs(k - fit.k) for k, fit in zip(found, exact, strict=True))
            for found in (own, counted, binned)
        ]
        error = exact[0].k_stderr
        print(
            f"{name:22}{exact[0].k:10.5f}{error:12.5f}" + "".join(f"{one:12.1e}" for one in worst)
        )


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


def smollm2(rounds: int) -> None:
    """Every matrix of a real model, from its memory."""
    from examples.inspect_smollm2 import load

    model = load()[0]
    tensors = [p.detach() for p in model.parameters() if p.ndim == 2]
    arrays = [tensor.numpy() for tensor in tensors]
    ours, theirs = milliseconds(
        lambda: [weibull.fit(array) for array in arrays],
        lambda: [npm(tensor) for tensor in tensors],
        rounds=rounds,
    )
    numel = sum(array.size for array in arrays)
    print(
        f"\nSmolLM2-135M, {len(arrays)} matrices, {numel / 1e6:.0f} M weights: "
        f"{ours / 1e3:.2f} s, npm-weibull-py {theirs / 1e3:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    speed(rounds)
    accuracy()
    model(rounds)
    smollm2(max(3, rounds // 3))


if __name__ == "__main__":
    main()
