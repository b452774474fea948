"""The command line: each verb is a thin function over one Python function."""

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dynscope.errors import InputError

if TYPE_CHECKING:
    from dynscope.reading.run import Run
    from dynscope.reports import Report

app = typer.Typer(
    name="dynscope",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunFile = Annotated[Path, typer.Argument(help="A run file, as dynscope.attach writes it.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Where to write; derived from the run's name.")
]
Force = Annotated[bool, typer.Option("--force", help="Write over an existing file.")]
Format = Literal["csv", "parquet", "json", "netcdf"]
Method = Literal["exact", "binned"]
Trim = Literal["mid_80", "mid_90", "full_range"]
Open = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]


def main() -> None:
    """Run the command line: errors of the user's are one line on stderr."""
    try:
        app(prog_name="dynscope")
    except InputError as error:
        _end(f"dynscope: {error}", error.exit_code)
    except BrokenPipeError:
        # The reader has gone (`| head`); without this Python complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        _end("dynscope: interrupted", 130)


def _version(wanted: bool) -> None:
    if wanted:
        from dynscope import __version__

        print(f"dynscope {__version__}")
        raise typer.Exit


@app.callback(
    epilog="A run begins in Python: scope = dynscope.attach(model, 'run.h5', optimizer=optimizer)"
)
def _dynscope(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_version, help="Print the version."),
    ] = False,
) -> None:
    """See what training does to a network, from the run file that dynscope recorded."""


@app.command()
def report(run: RunFile, output: Output = None, force: Force = False, open: Open = False) -> None:
    """Write one self-contained HTML page that explains a run."""
    from dynscope.reading.run import load
    from dynscope.reports import report as make

    target = _target(output or run.parent / f"{run.stem}.report.html", force, [run])
    with Progress() as progress:
        page = make(load(run), progress)
    _write_page(page, target)
    _show(target, open)
    print(f"Next: dynscope compare {_quoted(run)} OTHER.h5, or dynscope info {_quoted(run)}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run files; the first is a.")],
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", help="A name for each run, in order.")
    ] = None,
    output: Output = None,
    force: Force = False,
    open: Open = False,
) -> None:
    """Write one HTML page that lays two or more runs over each other."""
    if len(runs) < 2:
        raise InputError(f"compare takes two or more runs; only {runs[0]} was given", exit_code=2)
    from dynscope.reading.run import load
    from dynscope.reports import compare as make

    target = _target(output or _compared(runs), force, runs)
    with Progress() as progress:
        page = make([load(run) for run in runs], label, progress)
    _write_page(page, target)
    _show(target, open)
    print(f"Next: dynscope report {_quoted(runs[-1])}")


@app.command()
def export(
    run: RunFile,
    to: Annotated[
        Format | None, typer.Option("--to", help="The format; by --output's suffix, else csv.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", "-m", help="Only this metric, or a pattern: 'activation/*'."),
    ] = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a run as CSV, Parquet, JSON or netCDF, for other tools."""
    from dynscope.reading import export as exporting
    from dynscope.reading.run import load

    if not run.name:  # "." and "/", from which no name can be derived
        raise InputError(f"{run}: is a directory, not a run file")
    suffix = output.suffix if output else ""
    chosen: str = to or next(
        (one for one, end in exporting.SUFFIXES.items() if end == suffix), "csv"
    )
    target = _target(output or run.with_suffix(exporting.SUFFIXES[chosen]), force, [run])
    found = load(run)
    with Progress("Writing") as progress:
        write = exporting.export
        _write(target, lambda part: write(found, part, chosen, metric or (), progress))
    print(f"Next, in Python: {exporting.reading(target, chosen)}")


@app.command()
def info(
    run: RunFile,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")] = False,
) -> None:
    """Say what is in a run file, and how the model was understood."""
    from dynscope.reading.run import load

    found = load(run)
    print(json.dumps(_contents(found), indent=2) if as_json else "\n".join(_description(found)))


@app.command()
def weights(
    paths: Annotated[
        list[str],
        typer.Argument(help="Checkpoints: files, folders or URLs; several are a series of steps."),
    ],
    output: Output = None,
    force: Force = False,
    roles: Annotated[
        list[str] | None, typer.Option("--roles", "-r", help="Only these roles: q,k,gate.")
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(
            "--match", "-m", help="Only parameters of this name, or a pattern: '*.mlp.*'."
        ),
    ] = None,
    method: Annotated[
        Method, typer.Option("--method", help="How to fit; binned is the paper's protocol.")
    ] = "exact",
    trim: Annotated[
        Trim, typer.Option("--trim", help="The part of the distribution that is fitted.")
    ] = "mid_80",
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, help="Processes on this machine.")
    ] = 1,
    scheduler: Annotated[
        str, typer.Option("--scheduler", help="A Dask scheduler that has workers: tcp://host:8786.")
    ] = "",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow", help="A class that you trust in a PyTorch file: argparse.Namespace."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")] = False,
) -> None:
    """Measure the weights of checkpoints, without data or model, into a run file."""
    from dynscope import sweep

    target = _target(output or sweep.output_name(paths), force, [])
    with Progress("Reading") as progress:
        run = sweep.weights(
            paths, target, method=method, trim=trim,
            roles=[role for given in roles or () for role in given.replace(" ", "").split(",")], match=match or (),
            workers=workers, scheduler=scheduler, allow=allow or (), overwrite=force,
            progress=lambda done, total, where: progress(_bar(done, total, where)),
        )  # fmt: skip
    print(json.dumps(_weighed(run), indent=2) if as_json else "\n".join(_weights_told(run)))
    gaps = ((gap.path, gap.reason) for gap in run.coverage if gap.metric == "weight")
    for line in _table("Not read", dict.fromkeys(gaps)):
        print(line, file=sys.stderr)


def _bar(done: int, total: int, where: str) -> str:
    from dynscope.reports.elements import words

    share = done / total if total else 1.0
    return f"{'█' * round(20 * share):░<20} {share:4.0%} of {words.size(total)}, {where}"


def _weighed(run: "Run") -> dict[str, Any]:
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


def _weights_told(run: "Run") -> Iterable[str]:
    """What `weights` found, for a person."""
    from dynscope.analysis.by_role import by_role, lines
    from dynscope.reports.elements import words

    yield f"Wrote {run.path} ({words.size(run.path.stat().st_size)})"
    yield ""
    yield from lines(run, by_role(run))
    yield ""
    yield f"Next: dynscope report {_quoted(run.path)}, or dynscope compare {_quoted(run.path)} OTHER.h5"


class Progress:
    """Says on a terminal what is being done, once it takes longer than a second."""

    def __init__(self, verb: str = "Drawing") -> None:
        self._verb = verb

    def __enter__(self) -> Callable[[str], None]:
        self._start, self._shown = monotonic(), False
        return self._tell

    def _tell(self, what: str) -> None:
        if sys.stderr.isatty() and monotonic() - self._start > 1:
            print(f"\r\033[K{self._verb}: {what} …", end="", file=sys.stderr, flush=True)
            self._shown = True

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _end(message: str, code: int) -> None:
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)


def _compared(runs: list[Path]) -> Path:
    stems = [run.stem for run in runs[:3]]
    more = [f"and-{len(runs) - 3}-more"] if len(runs) > 3 else []
    return runs[0].parent / f"{'-'.join(stems + more)}.compare.html"


def _target(output: Path, force: bool, runs: Iterable[Path]) -> Path:
    """``output``, when it may be written; asked before any work is done."""
    if any(output.exists() and run.exists() and output.samefile(run) for run in runs):
        raise InputError(f"{output}: is the run itself; give another --output", exit_code=2)
    if output.is_dir():
        raise InputError(f"{output}: is a directory; give a file name with --output", exit_code=2)
    if not output.parent.is_dir():
        raise InputError(f"{output}: the directory {output.parent} does not exist; create it first")
    if output.exists() and not force:
        raise InputError(f"{output}: exists already; --force writes over it, --output elsewhere")
    return output


def _write_page(page: "Report", target: Path) -> None:
    _write(target, lambda part: part.write_bytes(page.html.encode()))


def _write(target: Path, fill: Callable[[Path], object]) -> None:
    """Write all of a file or nothing, so that an existing one is kept when this fails."""
    from dynscope.reports.elements import words

    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        fill(part)
        size = part.stat().st_size
        part.replace(target)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}; give another --output") \
            from None  # fmt: skip
    finally:
        part.unlink(missing_ok=True)
    print(f"Wrote {target} ({words.size(size)})")


def _show(target: Path, wanted: bool) -> None:
    if wanted:
        import webbrowser

        webbrowser.open(target.resolve().as_uri())


def _quoted(path: Path) -> str:
    from shlex import quote

    return quote(f"./{path}" if str(path).startswith("-") else str(path))


def _contents(run: "Run") -> dict[str, Any]:
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


def _description(run: "Run") -> Iterable[str]:
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
    yield from _table(
        "Events", ((f"step {one.step:,}", one.kind, one.message) for one in run.events)
    )
    yield from _table(
        "Not recorded",
        ((one.path or "everything", one.metric or "all", one.reason) for one in run.coverage),
    )
    yield ""
    yield f"Next: dynscope report {_quoted(run.path)}"


MOST_LINES = 20


def _table(title: str, rows: Iterable[tuple[str, ...]]) -> Iterable[str]:
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


if __name__ == "__main__":
    main()
