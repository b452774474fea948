"""Small synthetic runs, written through the real writer, for tests that only read."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dynscope.catalogue import METRICS, Metric
from dynscope.runfile.schema import Header, metric_dtype
from dynscope.site import Parameter, Site
from dynscope.writing.writer import RunWriter

Array = np.ndarray[Any, Any]

WIDTH = 64
HALF_NORMAL_K = 1.2054


def make_run(
    path: str | os.PathLike[str],
    blocks: int = 4,
    steps: int = 10,
    *,
    every: int = 1,
    growth: float = 0.3,
    seed: int = 0,
    name: str = "synthetic",
    config: Mapping[str, Any] | None = None,
    metrics: tuple[Metric, ...] = tuple(METRICS.values()),
    close: bool = True,
) -> Path:
    """Write a run of a Pre-LN language model with every catalogue metric filled.

    The variance of the residual stream grows with depth as ``(1 + depth)^(2 growth)``, gradients
    fall with depth, one massive activation begins in the third block, the loss falls. Steps are
    ``1, 1 + every, ...``; weights are measured at the first, the last and the powers of two among
    the records. With ``close=False`` the file is left as a kill of its writer would leave it.
    """
    random = np.random.default_rng(seed)
    header = Header(
        metrics=metrics,
        name=name,
        config={"blocks": blocks, "width": WIDTH, "norm": "pre", **(config or {})},
        versions={"python": "3.11.7", "dynscope": "0.1.0", "torch": "2.13.0"},
        settings={"every": every, "sites": "blocks", "metrics": "full",
                  "angular_distance": "mean over tokens", "weibull_method": "exact mid_80"},
        optimizer_groups=2,
    )  # fmt: skip
    writer = RunWriter(path, header)
    sites, parameters = make_sites(blocks), make_parameters(blocks)
    writer.sites(sites)
    writer.parameters(parameters)
    for index in range(steps):
        step, time = 1 + index * every, 1.7e9 + index
        progress = index / max(1, steps - 1)
        site_rows = _site_rows(sites, progress, growth, blocks, random)
        parameter_rows = _parameter_rows(parameters, progress, blocks, random)
        rows = site_rows | parameter_rows | _optimizer_rows(progress)
        writer.row(step, time, _typed(rows), tokens=4096 * step, cost=0.002)
        if index & (index - 1) == 0 or index == steps - 1:
            writer.weights(step, time, _typed(_weight_rows(parameters, progress, random)))
        loss = 2 + 2 * np.exp(-4 * progress) + random.normal(0, 0.02)
        writer.scalars(step, time, {"loss": loss, "gradient_norm": 1.5 - progress})
    writer.event(1, 1.7e9, "start", "recording began")
    writer.coverage(1, "site", "head", "activation/angular_distance", "input and output differ")
    writer.flush()
    as_killed = Path(path).read_bytes()
    writer.close()
    if not close:
        Path(path).write_bytes(as_killed)
    return Path(path)


def make_sites(blocks: int) -> tuple[Site, ...]:
    """Embedding, and per block the residual stream and its two sublayers, and the head."""
    sites = [Site("embed", "embed", type="Embedding", dtype="float32")]
    for d in range(blocks):
        sites += [
            Site(f"blocks.{d}.attention", "attention", 0, d, "Attention", "float32"),
            Site(f"blocks.{d}.ffn", "ffn", 0, d, "FeedForward", "float32"),
            Site(f"blocks.{d}", "block", 0, d, "Block", "float32"),
        ]
    return (*sites, Site("head", "head", type="Linear", dtype="float32"))


def make_parameters(blocks: int) -> tuple[Parameter, ...]:
    """Embedding, per block q, k, v, o, up, down and two norms, and the head."""
    square, up, down = (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)
    shapes = [("attention.q", "q", square), ("attention.k", "k", square),
              ("attention.v", "v", square), ("attention.o", "o", square),
              ("ffn.up", "up", up), ("ffn.down", "down", down),
              ("norm1", "norm", (WIDTH,)), ("norm2", "norm", (WIDTH,))]  # fmt: skip
    found = [Parameter("embed.weight", "embed", 0, -1, (256, WIDTH), 256 * WIDTH, True, 0)]
    for d in range(blocks):
        found += [
            Parameter(f"blocks.{d}.{path}.weight", role, 0, d, shape, int(np.prod(shape)), True,
                      int(role == "norm"))
            for path, role, shape in shapes
        ]  # fmt: skip
    return (*found, Parameter("head.weight", "head", 0, -1, (256, WIDTH), 256 * WIDTH, True, 0))


def _site_rows(
    sites: tuple[Site, ...],
    progress: float,
    growth: float,
    blocks: int,
    random: np.random.Generator,
) -> dict[str, Array]:
    depth = np.array([s.depth for s in sites])
    stream = np.array([s.role in ("block", "embed") for s in sites])
    sublayer = np.array([s.role in ("attention", "ffn") for s in sites])
    block = np.array([s.role == "block" for s in sites])
    noise = np.exp(random.normal(0, 0.02, len(sites)))
    rms = noise * (1 + progress) * np.where(stream, (1.0 + depth + 1) ** growth, 0.5)
    massive = np.where(block & (depth >= 2), 300.0 * progress, 0)
    absmax = np.maximum(4.5 * rms, massive)
    count = np.full(len(sites), 4096.0 * WIDTH)
    gradient = 1e-4 * noise * (1.0 + np.maximum(depth, 0)) ** -0.5 * np.exp(-progress)
    share = np.where(sublayer, 0.5 * (1.0 + np.maximum(depth, 0)) ** -growth, np.nan)
    turn = np.where(block, 0.25 / (1.0 + np.maximum(depth, 0)), np.nan)
    top = np.stack([absmax, np.maximum(4.2 * rms, 0.9 * massive), 4 * rms], axis=1)
    return {
        "activation/n_calls": np.ones(len(sites)), "activation/count": count,
        "activation/mean": 0.01 * rms, "activation/variance": rms**2 * (1 - 1e-4),
        "activation/rms": rms, "activation/absmax": absmax, "activation/mean_abs": 0.8 * rms,
        "activation/median_abs": 0.67 * rms, "activation/kurtosis": 3 + absmax / rms / 10,
        "activation/zero_fraction": np.zeros(len(sites)),
        "activation/nonfinite_count": np.zeros(len(sites)),
        "activation/fp16_overflow_fraction": np.zeros(len(sites)),
        "activation/massive_ratio": absmax / (0.67 * rms),
        "activation/massive_count": np.where((absmax > 100) & (absmax > 670 * rms), 4.0, 0),
        "activation/branch_ratio": share, "activation/angular_distance": turn,
        "activation/cosine_to_input": np.cos(np.pi * turn),
        "activation/channel_mean_energy": np.full(len(sites), 1e-4),
        "massive/value": top, "massive/channel": np.tile([17, 17, 3], (len(sites), 1)),
        "massive/token": np.tile([0, 0, 42], (len(sites), 1)),
        "massive/batch": np.tile([0, 1, 0], (len(sites), 1)),
        "activation_gradient/n_calls": np.ones(len(sites)),
        "activation_gradient/rms": gradient, "activation_gradient/norm": gradient * np.sqrt(count),
        "activation_gradient/absmax": 6 * gradient,
        "activation_gradient/nonfinite_count": np.zeros(len(sites)),
    }  # fmt: skip


def _parameter_rows(
    parameters: tuple[Parameter, ...], progress: float, blocks: int, random: np.random.Generator
) -> dict[str, Array]:
    depth = np.array([max(p.depth, 0) for p in parameters])
    size = np.sqrt([float(p.numel) for p in parameters])
    noise = np.exp(random.normal(0, 0.05, len(parameters)))
    rms = 1e-3 * noise * np.exp(-progress - depth / max(1, blocks))
    update = 1e-3 * noise * (1 - 0.9 * progress)
    return {
        "gradient/norm": rms * size, "gradient/norm_before_clip": 2 * rms * size,
        "gradient/rms": rms, "gradient/absmax": 5 * rms,
        "gradient/nonfinite_count": np.zeros(len(parameters)),
        "update/norm": update * 0.02 * size, "update/ratio": update,
    }  # fmt: skip


def _optimizer_rows(progress: float) -> dict[str, Array]:
    return {
        "optimizer/lr": np.full(2, 1e-3 * (1 - 0.9 * progress)),
        "optimizer/weight_decay": np.array([0.1, 0.0]),
        "optimizer/beta1": np.full(2, 0.9), "optimizer/beta2": np.full(2, 0.95),
        "optimizer/eps": np.full(2, 1e-8),
    }  # fmt: skip


def _weight_rows(
    parameters: tuple[Parameter, ...], progress: float, random: np.random.Generator
) -> dict[str, Array]:
    size = np.sqrt([float(p.numel) for p in parameters])
    matrix = np.array([len(p.shape) == 2 for p in parameters])
    selective = np.array([p.role in ("q", "k") for p in parameters])
    k = (
        HALF_NORMAL_K
        - progress * np.where(selective, 0.2, 0.01)
        + random.normal(0, 1e-3, len(size))
    )
    rms = 0.02 * (1 + progress)
    return {
        "weight/norm": rms * size, "weight/rms": np.full(len(size), rms),
        "weight/absmax": np.full(len(size), 5 * rms), "weight/mean": np.where(matrix, 0.0, 1.0),
        "weight/weibull_k": np.where(matrix, k, np.nan),
        "weight/weibull_lambda": np.where(matrix, 0.8875 * rms, np.nan),
        "weight/weibull_r2": np.where(matrix, 0.997, np.nan),
        "weight/weibull_ks": np.where(matrix, 0.01, np.nan),
        "weight/weibull_n": np.where(matrix, 0.8 * size**2, np.nan),
        "weight/weibull_k_standard_error": np.where(matrix, 1.4 / size, np.nan),
        "weight/zero_fraction": np.zeros(len(size)),
        "weight/q90_q10": np.full(len(size), 13.1), "weight/q99_q50": np.full(len(size), 3.82),
        "weight/q999_q50": np.full(len(size), 4.88), "weight/gini": np.full(len(size), 0.414),
        "weight/nonfinite_count": np.zeros(len(size)),
    }  # fmt: skip


def _typed(rows: dict[str, Array]) -> dict[str, Array]:
    return {name: np.asarray(values, metric_dtype(name)) for name, values in rows.items()}
