"""What is known of a run, in numbers: the tiles and the list of facts at the top of its page."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np

from dynscope.reading.run import Metadata
from dynscope.reports.elements import words
from dynscope.reports.elements.charts import Tile, Tone
from dynscope.reports.elements.words import number
from dynscope.reports.numbers.measured import Measured
from dynscope.site import Parameter, Site, wholes


def tiles(measured: Measured) -> tuple[Tile, ...]:
    """The numbers that are seen first."""
    run = measured.run
    if not len(run.steps):
        return ()
    last = int(run.steps[-1])
    found = [Tile("Steps", words.integer(last), f"{words.integer(len(run.steps))} recorded")]
    loss = loss_ends(measured)
    if loss is not None:
        found.append(Tile("Loss", number(loss[1]), f"from {number(loss[0])}"))
    found.append(
        Tile(
            f"{measured.noun.capitalize()}s",
            words.integer(len(depths(measured))),
            _model_size(measured),
        )
    )
    top = largest(measured)
    if top is not None:
        found.append(Tile("Largest activation", number(top.value), top.place))
    bad = nonfinite_total(measured)
    if bad is not None:
        tone: Tone = "bad" if bad else "good"
        found.append(Tile("Non-finite values", words.integer(bad), "in all sites", tone))
    share = cost_share(measured)
    if isfinite(share):
        found.append(Tile("dynscope's cost", words.percent(share), "of the training time"))
    return tuple(found)


def facts(measured: Measured) -> tuple[tuple[str, str], ...]:
    """What is known of the run, as name and value."""
    run, metadata = measured.run, measured.run.metadata
    steps = run.steps
    rows: list[tuple[str, str]] = [
        ("File", run.path.name),
        ("Created", metadata.created),
        ("Closed", "yes" if metadata.closed else "no: still being written, or killed"),
    ]
    if len(steps):
        span = f"{words.integer(int(steps[0]))} to {words.integer(int(steps[-1]))}"
        rows.append(("Recorded steps", f"{words.integer(len(steps))} ({span})"))
    if len(run.weight_steps):
        rows.append(("Steps with weights", words.integer(len(run.weight_steps))))
    rows += [
        (f"{measured.noun.capitalize()}s", words.integer(len(depths(measured)))),
        ("Sites", words.integer(len(run.sites))),
        (
            "Parameters",
            f"{words.count(len(wholes(run.parameters)), 'tensor')}, {_model_size(measured)}",
        ),
        ("Metrics", words.integer(len(run.metrics))),
    ]
    tokens = np.asarray(run["clock/tokens"].values)
    if tokens.size and tokens.max() > 0:
        rows.append(("Tokens", words.integer(int(tokens.max()))))
    seconds = wall_time(measured)
    if seconds > 0:
        rows.append(("Wall time", words.duration(seconds)))
    if metadata.world_size > 1:
        rows.append(("Processes", words.integer(metadata.world_size)))
    if run.segments > 1:
        rows.append(("Resumed", words.count(run.segments - 1, "time")))
        rows += list(_earlier(metadata))
    rows += [(name, version) for name, version in metadata.versions.items()]
    rows += [(name.replace("_", " "), str(value)) for name, value in metadata.settings.items()]
    return tuple(rows)


def _earlier(metadata: Metadata) -> Iterator[tuple[str, str]]:
    """What segments before the last were recorded with, where that was not the same."""
    for before in metadata.segments:
        differing = [
            f"{key} = {value}"
            for now, told in ((metadata.config, "config"), (metadata.settings, "settings"),
                              (metadata.versions, "versions"))
            for key, value in before[told].items()
            if now.get(key) != value
        ]  # fmt: skip
        span = f"{before['segment']}" + f"-{before['until']}" * (
            before["until"] > before["segment"]
        )
        if differing:
            yield f"Segment {span} had", ", ".join(differing)


def depths(measured: Measured) -> list[tuple[int, int]]:
    """The blocks of the run: (stack, depth), without repetition."""
    modules = {
        s.module: (s.stack, s.depth) for s in reversed(measured.run.sites) if s.role == "block"
    }
    blocks = set(modules.values())
    every: list[Site | Parameter] = [*measured.run.sites, *measured.run.parameters]
    return sorted(blocks or {(one.stack, one.depth) for one in every if one.depth >= 0})


@dataclass(frozen=True)
class Largest:
    """The largest activation of the run, and where it was."""

    value: float
    ratio: float
    place: str
    where: str


def largest(measured: Measured) -> Largest | None:
    """The largest finite magnitude of any site at any step, None where none was recorded."""
    if not measured.has("activation/absmax"):
        return None
    absmax = measured.array("activation/absmax")
    finite = np.where(np.isfinite(absmax), absmax, -1)
    if not finite.size or finite.max() < 0:
        return None
    row, column = np.unravel_index(int(finite.argmax()), finite.shape)
    site, step = measured.run.sites[column], int(measured.run.steps[row])
    name = site.path or "the model"
    place = f"{measured.noun} {site.depth}" if site.depth >= 0 else name
    where = f"{name} at step {words.integer(step)}"
    if measured.has("massive/channel"):
        channel = int(measured.array("massive/channel")[row, column, 0])
        token = int(measured.array("massive/token")[row, column, 0])
        if channel >= 0:
            place += f", channel {channel}"
            where += f", channel {channel}" + (f", token {token}" if token >= 0 else "")
    ratio = nan
    if measured.has("activation/massive_ratio"):
        ratio = float(measured.array("activation/massive_ratio")[row, column])
    return Largest(float(finite.max()), ratio, place, where)


def nonfinite_total(measured: Measured) -> int | None:
    """NaN and infinite elements seen in all sites at all recorded steps; None if not recorded."""
    if not measured.has("activation/nonfinite_count"):
        return None
    counts = measured.array("activation/nonfinite_count")
    return None if np.isnan(counts).all() else int(np.nansum(counts))


def wall_time(measured: Measured) -> float:
    time = np.asarray(measured.run["clock/time"].values)
    return float(time[-1] - time[0]) if len(time) > 1 else nan


def cost_share(measured: Measured) -> float:
    """Time added by dynscope over wall time; the first row's cost lies before the clock starts."""
    cost = np.asarray(measured.run["clock/cost"].values)[1:]
    seconds = wall_time(measured)
    return float(np.nansum(cost)) / seconds if seconds > 0 and np.isfinite(cost).any() else nan


def _model_size(measured: Measured) -> str:
    return f"{words.parameters(sum(one.numel for one in wholes(measured.run.parameters)))} weights"


def loss_ends(measured: Measured) -> tuple[float, float, int] | None:
    """First and last finite loss, and the step of the last."""
    for name in measured.loss_names[:1]:
        steps, values = measured.scalar(name)
        finite = np.flatnonzero(np.isfinite(values))
        if finite.size:
            first, last = finite[0], finite[-1]
            return float(values[first]), float(values[last]), int(steps[last])
    return None
