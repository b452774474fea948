"""The command line: each verb is a thin function over one Python function."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dynscope.cli.output import Progress, show, writable, write_page, write_whole
from dynscope.cli.told import contents, description, quoted, table, weighed, weights_told
from dynscope.errors import InputError

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

    target = writable(output or run.parent / f"{run.stem}.report.html", force, [run])
    with Progress() as progress:
        page = make(load(run), progress)
    write_page(page, target)
    show(target, open)
    print(f"Next: dynscope compare {quoted(run)} OTHER.h5, or dynscope info {quoted(run)}")


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

    target = writable(output or _compared(runs), force, runs)
    with Progress() as progress:
        page = make([load(run) for run in runs], label, progress)
    write_page(page, target)
    show(target, open)
    print(f"Next: dynscope report {quoted(runs[-1])}")


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
    target = writable(output or run.with_suffix(exporting.SUFFIXES[chosen]), force, [run])
    found = load(run)
    with Progress("Writing") as progress:
        write = exporting.export
        write_whole(target, lambda part: write(found, part, chosen, metric or (), progress))
    print(f"Next, in Python: {exporting.reading(target, chosen)}")


@app.command()
def info(
    run: RunFile,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")] = False,
) -> None:
    """Say what is in a run file, and how the model was understood."""
    from dynscope.reading.run import load

    found = load(run)
    print(json.dumps(contents(found), indent=2) if as_json else "\n".join(description(found)))


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

    target = writable(output or sweep.output_name(paths), force, [])
    with Progress("Reading") as progress:
        run = sweep.weights(
            paths, target, method=method, trim=trim,
            roles=[role for given in roles or () for role in given.replace(" ", "").split(",")], match=match or (),
            workers=workers, scheduler=scheduler, allow=allow or (), overwrite=force,
            progress=lambda done, total, where: progress(_bar(done, total, where)),
        )  # fmt: skip
    print(json.dumps(weighed(run), indent=2) if as_json else "\n".join(weights_told(run)))
    gaps = ((gap.path, gap.reason) for gap in run.coverage if gap.metric == "weight")
    for line in table("Not read", dict.fromkeys(gaps)):
        print(line, file=sys.stderr)


def _bar(done: int, total: int, where: str) -> str:
    from dynscope.reports.elements import words

    share = done / total if total else 1.0
    return f"{'█' * round(20 * share):░<20} {share:4.0%} of {words.size(total)}, {where}"


def _end(message: str, code: int) -> None:
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)


def _compared(runs: list[Path]) -> Path:
    stems = [run.stem for run in runs[:3]]
    more = [f"and-{len(runs) - 3}-more"] if len(runs) > 3 else []
    return runs[0].parent / f"{'-'.join(stems + more)}.compare.html"
