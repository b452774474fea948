"""The arguments of `attach`, checked before anything happens: each error is one line with its remedy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dynscope.catalogue import BUNDLES, Metric, bundle
from dynscope.errors import InputError
from dynscope.hooks.tensor.custom import SiteMetric
from dynscope.hooks.training.optimizer import Optimizers
from dynscope.hooks.training.wrapped import Followed, followed
from dynscope.hooks.watch.padding import MaskSpec

MetricChoice = str | SiteMetric | Sequence[str | SiteMetric]


def check(
    model: object,
    *,
    scaler: object,
    config: object,
    mask: MaskSpec | None,
    budget: float | None,
    streams: tuple[int, int] | None,
    start_step: int | None,
    resume: bool,
    overwrite: bool,
) -> None:
    """Raise `InputError` for what `attach` cannot take; `optimizers` and `choose` check the rest."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{type(model).__name__} is no model: give a torch.nn.Module", 2)
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise InputError(f"scaler={type(scaler).__name__}: give a torch.amp.GradScaler", 2)
    if resume and overwrite:
        raise InputError("resume=True and overwrite=True contradict each other: give one", 2)
    if config is not None and not isinstance(config, Mapping):
        raise InputError(
            f"config={type(config).__name__}: give a dict (of an argparse.Namespace: vars(args))", 2
        )
    if mask is not None and not (callable(mask) or isinstance(mask, (str, torch.Tensor))):
        raise InputError(
            f"mask={type(mask).__name__}: give the name of an argument of the model, a tensor, or a "
            "function of (args, kwargs)",
            2,
        )
    if budget is not None and not 0 < budget <= 1:
        raise InputError(f"budget={budget!r}: give a share of the time, such as 0.02", 2)
    if streams is not None and not (len(streams) == 2 and streams[0] > 0):
        raise InputError(f"streams={streams!r}: give (how many, the axis that counts them)", 2)
    if start_step is not None and start_step < 0:
        raise InputError(
            f"start_step={start_step}: give the number of steps done before, 0 or more", 2
        )


def optimizers(given: Any) -> Optimizers:
    """The optimizers that ``attach(optimizer=)`` was given: none, one or several, perhaps wrapped."""
    each = () if given is None else given if isinstance(given, (list, tuple)) else (given,)
    found: list[Followed] = []
    for one in each:
        if not (inside := followed(one)):
            raise InputError(
                f"optimizer={type(one).__name__}: give a torch.optim.Optimizer or a wrapper that holds "
                "one, a list of several, or none and call scope.step() once per step",
                2,
            )
        found += inside
    if len({id(one.optimizer) for one in found}) < len(found):
        raise InputError("optimizer=[...] names one optimizer twice: give each once", 2)
    return Optimizers(found)


@dataclass(frozen=True)
class Chosen:
    """A bundle, all metrics with the user's own, and those alone."""

    bundle: str
    metrics: tuple[Metric, ...]
    custom: tuple[SiteMetric, ...]


def choose(metrics: MetricChoice) -> Chosen:
    """The metrics that ``attach(metrics=)`` names."""
    wanted = [metrics] if isinstance(metrics, (str, SiteMetric)) else list(metrics)
    custom = tuple(metric for metric in wanted if isinstance(metric, SiteMetric))
    names = [metric for metric in wanted if not isinstance(metric, SiteMetric)] or ["standard"]
    if len(names) > 1 or names[0] not in BUNDLES:
        raise InputError(
            f"metrics={metrics!r} names no bundle: give one of {', '.join(BUNDLES)}, "
            "alone or in a list with SiteMetric objects of your own",
            2,
        )
    catalogue = bundle(names[0])
    taken = {metric.name for metric in catalogue}
    for metric in custom:
        if metric.name in taken:
            raise InputError(f"metric name {metric.name!r} is taken: choose another one", 2)
        taken.add(metric.name)
    return Chosen(names[0], (*catalogue, *(metric.metric for metric in custom)), custom)
