"""`attach`: one line that connects a training loop to a run file."""

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynscope.catalogue import BUNDLES, Metric, bundle
from dynscope.errors import InputError
from dynscope.hooks.model.anatomy import Anatomy
from dynscope.hooks.process import end_recording_of
from dynscope.hooks.recorder import Plan, Recorder
from dynscope.hooks.recording.survey import retrace
from dynscope.hooks.tensor.custom import SiteMetric
from dynscope.hooks.training.optimizer import Optimizers
from dynscope.hooks.training.schedule import Spec, describe, schedule
from dynscope.hooks.training.wrapped import Followed, followed
from dynscope.hooks.watch.padding import MaskSpec, Padding
from dynscope.hooks.watch.places import Places
from dynscope.runfile.schema import Header
from dynscope.weibull import WeibullFit
from dynscope.writing.feed import Feed

MetricChoice = str | SiteMetric | Sequence[str | SiteMetric]


def attach(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    every: Spec = 10,
    sites: str | Iterable[str] = "blocks",
    metrics: MetricChoice = "standard",
    weights_every: Spec = "log",
    blocks: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    name: str = "",
    scaler: Any | None = None,
    streams: tuple[int, int] | None = None,
    mask: MaskSpec | None = None,
    budget: float | None = None,
    resume: bool = False,
    overwrite: bool = False,
    start_step: int | None = None,
    summary: bool = True,
) -> Recorder:
    """Record the training of ``model`` into the run file ``path``.

    ``optimizer``: its steps are counted, its gradients and updates read (of a list of several, a
    step is over when each has stepped); without it call
    ``scope.step()`` after each step. ``every``: an interval (step 1 and its multiples), ``"log"``
    for log-spaced steps, or a function ``step -> bool``; steps count from 1. ``sites``:
    ``"blocks"`` (embedding, residual stream and sublayers), ``"leaves"`` (every layer), a pattern
    of module paths or a list of them. ``metrics``: ``"light"``, ``"standard"`` or ``"full"``, or a
    list of one of them and metrics of your own (`SiteMetric`). ``weights_every``: when the weights
    are fitted, as ``every``; also at the start and at close. ``blocks``: corrects which modules
    are the depth axis. ``config``: metadata of yours, anything that JSON can hold. ``name``: of
    the run. ``scaler``: a `torch.amp.GradScaler`, so that skipped steps are told. ``streams``: (how many,
    axis) where a block's output holds several residual streams, as hyper-connections do; each is a
    site of its own, ``blocks.3[0]``. ``mask``: which positions of a batch
    are real, so that padding does not count: the name of an argument of the model that holds (batch,
    token) ones and zeros ("attention_mask"), a function of its ``(args, kwargs)``, or a tensor that
    you overwrite for each batch. ``budget``: the share of the time, 0.02 say, that recording may
    take; steps that are due are left out until it is within that. An existing
    ``path`` is refused unless ``resume`` (continue it) or ``overwrite``, but where this process
    still records to it, as when a notebook's cell is run again: that recording is closed, and the
    file goes on with a new segment from step 1. ``start_step``: steps done before this one, for a
    resumed training (by default those in the file). ``summary``:
    whether two lines are printed to stderr.

    Raises `InputError` for bad arguments and unusable paths, before training starts; afterwards
    nothing raises.
    """
    if resume and overwrite:
        raise InputError("resume=True and overwrite=True contradict each other: give one", 2)
    optimizers = _optimizers(optimizer)
    _check(model, scaler)
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
    wrapped, model = model, getattr(model, "_orig_mod", model)
    chosen = _choose(metrics)
    light = chosen.bundle == "light"

    def survey() -> tuple[Anatomy, Places]:
        anatomy = Anatomy.of(model, blocks)
        return anatomy, Places.of(anatomy, anatomy.select(sites), light=light, streams=streams)

    anatomy, places = survey()
    plan = Plan(
        record=schedule(every),
        weigh=schedule(weights_every, "weights_every"),
        light=light,
        full=chosen.bundle == "full",
        survey=survey,
        custom=chosen.custom,
        budget=budget,
        padding=None if mask is None else Padding(mask),
    )
    header = Header(
        metrics=chosen.metrics,
        name=str(name),
        config=dict(config or {}),
        versions=_versions(),
        world_size=_world()[1],
        settings={
            "every": "callable" if callable(every) else every,
            "weights_every": "callable" if callable(weights_every) else weights_every,
            "sites": sites if isinstance(sites, str) else list(sites),
            "metrics": chosen.bundle,
            **({"budget": budget} if budget is not None else {}),
            **({"mask": mask if isinstance(mask, str) else "given"} if mask is not None else {}),
            "angular_distance": "mean over all tokens",
            "weibull_method": WeibullFit().protocol,
            "model": type(model).__name__,
        },
        anatomy=anatomy.tree(),
        optimizer_groups=len(optimizers.groups()),
    )
    place = _rank_path(path)
    again = end_recording_of(place)
    if again and not resume:
        start_step = start_step or 0
    feed = Feed(
        place,
        header,
        overwrite=overwrite,
        resume=resume or (again and not overwrite),
        start_step=start_step,
    )
    try:
        recorder = Recorder(
            wrapped,
            feed,
            plan,
            optimizers=optimizers,
            scaler=scaler,
            start_step=feed.last_step if start_step is None else start_step,
            tokens=feed.tokens,
        )
    except BaseException:
        feed.close()
        raise
    if retrace():
        recorder.tell("compile", "compiled code was reset so that it is traced with the hooks")
    if summary:
        print(_summary(feed.path, places, anatomy, chosen, every), file=sys.stderr)
    return recorder


def _optimizers(given: Any) -> Optimizers:
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


def _check(model: object, scaler: object) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"{type(model).__name__} is no model: give a torch.nn.Module", 2)
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise InputError(f"scaler={type(scaler).__name__}: give a torch.amp.GradScaler", 2)


@dataclass(frozen=True)
class _Chosen:
    bundle: str
    metrics: tuple[Metric, ...]
    custom: tuple[SiteMetric, ...]


def _choose(metrics: MetricChoice) -> _Chosen:
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
    return _Chosen(names[0], (*catalogue, *(metric.metric for metric in custom)), custom)


def _versions() -> dict[str, str]:
    try:
        own = version("dynscope")
    except PackageNotFoundError:
        own = "unknown"
    return {"python": platform.python_version(), "torch": torch.__version__, "dynscope": own}


def _world() -> tuple[int, int]:
    """Rank and number of ranks."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _rank_path(path: str | os.PathLike[str]) -> Path:
    """``path`` on rank 0, ``run.rank3.h5`` beside it on rank 3."""
    given, (rank, _) = Path(path), _world()
    return given if rank == 0 else given.with_name(f"{given.stem}.rank{rank}{given.suffix}")


def _summary(path: str, places: Places, anatomy: Anatomy, chosen: _Chosen, every: Spec) -> str:
    blocks = sum(site.role == "block" for site in anatomy.sites)
    axis = "depth by call order" if anatomy.by_call_order else f"{blocks} blocks"
    cells = {"site": len(places.sites), "parameter": len(anatomy.parameters), "top": 3}
    per_row = sum(
        4 * cells.get(m.axes[1], 1) * (3 if "top" in m.axes else 1)
        for m in chosen.metrics
        if m.axes[0] == "step"
    )
    return (
        f"dynscope: {len(places.sites)} sites over {axis}, {len(anatomy.parameters)} parameters, "
        f"{chosen.bundle} metrics, {describe(every)}\n"
        f"dynscope: writing {path}, about {1000 * per_row / 1e6:.1f} MB per 1,000 recorded steps"
    )
