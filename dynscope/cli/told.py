"""What `info` and `weights` say of a run: for a script, and for a person."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynscope.reading.run import Run


def weighed(run: "Run") -> dict[str, Any]:
    """What `weights` found, for a script."""
    from dataclasses import asdict

    from dynscope.analysis.by_role import by_role

    return {
        "path": str(run.path),
        "steps": [int(step) for step in run.weight_steps],
        "settings": run.metadata.settings,
        "roles": [one.to_json() for step in run.weight_steps for one in by_role(run, int(step))],
        "coverage": [asdict(gap) for gap in run.coverage],
    }


def weights_told(run: "Run") -> Iterable[str]:
    """What `weights` found, for a person."""
    from dynscope.analysis.by_role import by_role, lines
    from dynscope.reports.elements import words

    yield f"Wrote {run.path} ({words.size(run.path.stat().st_size)})"
    yield ""
    yield from lines(run, by_role(run))
    yield ""
    yield f"Next: dynscope report {quoted(run.path)}, or dynscope compare {quoted(run.path)} OTHER.h5"


def contents(run: "Run") -> dict[str, Any]:
    """What `info` says, for a script."""
    from dataclasses import asdict

    steps = [int(step) for step in run.steps]
    return {
        "path": str(run.path),
        "bytes": run.path.stat().st_size,
        **asdict(run.metadata),
        "segments": run.segments,
        "earlier_segments": run.metadata.segments,
        "steps": {"recorded": len(steps), "first": min(steps, default=None),
                  "last": max(steps, default=None), "weights": len(run.weight_steps)},
        "scalars": list(run.scalar_names),
        "metrics": [{"name": m.name, "axes": m.axes, "unit": m.unit} for m in run.metrics],
        "sites": [asdict(site) for site in run.sites],
        "parameters": [asdict(parameter) for parameter in run.parameters],
        "events": [asdict(event) for event in run.events],
        "coverage": [asdict(gap) for gap in run.coverage],
    }  # fmt: skip


def description(run: "Run") -> Iterable[str]:
    """What `info` says, for a person."""
    from dynscope.reports.elements import words
    from dynscope.site import wholes
    from dynscope.structure.outline import outline

    metadata = run.metadata
    closed = "closed" if metadata.closed else "not closed: still being written, or killed"
    yield f"{metadata.name or run.path.stem}: {closed}"
    yield f"  file        {run.path} ({words.size(run.path.stat().st_size)}, format {metadata.format_version})"
    yield f"  created     {metadata.created} with {', '.join(f'{k} {v}' for k, v in metadata.versions.items())}"
    yield f"  steps       {_span(run.steps)}; weights at {len(run.weight_steps):,} of them"
    yield f"  scalars     {', '.join(run.scalar_names) or 'none'}"
    for name, content in (("config", metadata.config), ("settings", metadata.settings)):
        if content:
            yield f"  {name:10}  {', '.join(f'{key} = {value}' for key, value in content.items())}"
    if run.segments > 1:
        yield f"  resumed     {words.count(run.segments - 1, 'time')}"
    blocks = len({site.module for site in run.sites if site.role == "block"})
    axis, *tree = metadata.anatomy.splitlines() or (
        words.count(blocks, "block"), *outline(run.sites)
    )  # fmt: skip
    parameters = wholes(run.parameters)
    yield ""
    yield (f"Model: {axis}, {words.count(len(run.sites), 'site')} recorded, "
           f"{words.count(len(parameters), 'parameter')} ({words.parameters(sum(one.numel for one in parameters))} weights)")  # fmt: skip
    yield from (f"  {line}" for line in tree)
    yield ""
    yield f"Metrics: {len(run.metrics)}"
    width = max((len(metric.name) for metric in run.metrics), default=0)
    yield from (
        f"  {m.name:{width}}  {' × '.join(m.axes):24}  {m.unit}".rstrip() for m in run.metrics
    )
    yield from table(
        "Events", ((f"step {one.step:,}", one.kind, one.message) for one in run.events)
    )
    yield from table(
        "Not recorded",
        ((one.path or "everything", one.metric or "all", one.reason) for one in run.coverage),
    )
    yield ""
    yield f"Next: dynscope report {quoted(run.path)}"


MOST_LINES = 20


def table(title: str, rows: Iterable[tuple[str, ...]]) -> Iterable[str]:
    shown = list(rows)
    if shown:
        yield ""
        yield f"{title}: {len(shown)}"
        yield from (f"  {'  '.join(row)}" for row in shown[:MOST_LINES])
    if len(shown) > MOST_LINES:
        yield f"  … and {len(shown) - MOST_LINES} more (--json lists all)"


def _span(steps: Any) -> str:
    if not len(steps):
        return "none recorded"
    return f"{int(steps[0]):,} to {int(steps[-1]):,}, {len(steps):,} recorded"


def quoted(path: Path) -> str:
    from shlex import quote

    return quote(f"./{path}" if str(path).startswith("-") else str(path))
