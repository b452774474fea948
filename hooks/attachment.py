"""`attach`: one line that connects a training loop to a run file."""

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynscope.hooks.arguments import Chosen, MetricChoice, check, choose, optimizers
from dynscope.hooks.model.anatomy import Anatomy
from dynscope.hooks.process import end_recording_of
from dynscope.hooks.recorder import Plan, Recorder
from dynscope.hooks.recording.survey import retrace
from dynscope.hooks.training.schedule import Spec, describe, schedule
from dynscope.hooks.watch.padding import MaskSpec, Padding
from dynscope.hooks.watch.places import Places
from dynscope.runfile.schema import Header
from dynscope.weibull import WeibullFit
from dynscope.writing.feed import Feed


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
    check(
        model, scaler=scaler, config=config, mask=mask, budget=budget, streams=streams,
        start_step=start_step, resume=resume, overwrite=overwrite,
    )  # fmt: skip
    trained, chosen = optimizers(optimizer), choose(metrics)

    # Survey: what the model consists of, now and whenever it is rebuilt
    wrapped, model = model, getattr(model, "_orig_mod", model)
    light = chosen.bundle == "light"

    def survey() -> tuple[Anatomy, Places]:
        anatomy = Anatomy.of(model, blocks)
        return anatomy, Places.of(anatomy, anatomy.select(sites), light=light, streams=streams)

    anatomy, places = survey()

    # Plan: what to record and when
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
    settings = {
        "every": "callable" if callable(every) else every,
        "weights_every": "callable" if callable(weights_every) else weights_every,
        "sites": sites if isinstance(sites, str) else list(sites),
        "metrics": chosen.bundle,
        **({"budget": budget} if budget is not None else {}),
        **({"mask": mask if isinstance(mask, str) else "given"} if mask is not None else {}),
        "angular_distance": "mean over all tokens",
        "weibull_method": WeibullFit().protocol,
        "model": type(model).__name__,
    }
    header = Header(
        metrics=chosen.metrics,
        name=str(name),
        config=dict(config or {}),
        versions=_versions(),
        world_size=_world()[1],
        settings=settings,
        anatomy=anatomy.tree(),
        optimizer_groups=len(trained.groups()),
    )

    # Open: the file, which a recording of this process may still hold
    place = _rank_path(path)
    again = end_recording_of(place)
    if again and not resume:
        start_step, resume = start_step or 0, not overwrite
    feed = Feed(place, header, overwrite=overwrite, resume=resume, start_step=start_step)

    # Record
    try:
        recorder = Recorder(
            wrapped,
            feed,
            plan,
            optimizers=trained,
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


def _summary(path: str, places: Places, anatomy: Anatomy, chosen: Chosen, every: Spec) -> str:
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
