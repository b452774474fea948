"""`dynscope weights`: the weights of checkpoints, measured without a model into a run file."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np

from dynscope import weibull
from dynscope.catalogue import lookup
from dynscope.checkpoints import series
from dynscope.checkpoints.place import Place
from dynscope.errors import InputError, first_line
from dynscope.reading.run import Run
from dynscope.runfile.schema import Header
from dynscope.structure.configs import heads
from dynscope.structure.names import attention_kind
from dynscope.sweep.journal import AGAIN, Journal
from dynscope.sweep.plan import Choice, Plan
from dynscope.sweep.weigh import METRICS, UNREAD, Row, Task, Weighed, pooled, weigh
from dynscope.sweep.workers import cluster, here, processes
from dynscope.writing.writer import RunWriter

Tell = Callable[[int, int, str], object]
PathLike = str | os.PathLike[str]
Way = Callable[[Sequence[Task]], Iterator[Weighed]]

__all__ = ["output_name", "weights"]


def weights(
    paths: PathLike | Sequence[PathLike],
    output: PathLike | None = None,
    *,
    method: str = "exact",
    trim: str = "mid_80",
    roles: Sequence[str] = (),
    match: Sequence[str] = (),
    workers: int = 1,
    scheduler: str = "",
    allow: Sequence[str] = (),
    overwrite: bool = False,
    progress: Tell = lambda done, total, where: None,
) -> Run:
    """Measure the weights of a checkpoint, or of a series of them, into a run file.

    ``paths`` are files, folders and URLs (docs/checkpoints.md), a series in any order: its steps are
    those that the checkpoints name. ``output`` is derived from them by default (`output_name`).
    ``method`` and ``trim`` are those of `dynscope.weibull.fit`. ``roles`` and ``match`` (patterns of
    names, such as ``*.self_attn.*``) choose what is read. ``workers`` is the number of processes of
    this machine, which need the usual main guard in a script; ``scheduler`` the address of a Dask
    scheduler whose workers do it instead. ``allow`` names classes that a PyTorch file may hold
    besides tensors (``argparse.Namespace``): only those that you trust. ``progress`` is told bytes done, bytes in all and where.

    What was done is kept beside ``output`` until that is written: the same call goes on after a
    kill. What cannot be read is in the run's ``coverage``.

    Raises `InputError` for what is no checkpoint, when nothing fits the choice, and for an
    ``output`` that exists, unless ``overwrite``.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if workers < 1:
        raise InputError(f"workers={workers}: give 1 or more", exit_code=2)
    target = Path(output or output_name(given))
    if target.exists():
        _check_overwritten(target, overwrite)
    roles, match, allow = ([one] if isinstance(one, str) else one for one in (roles, match, allow))
    choice = Choice(method, trim, tuple(roles), tuple(match))
    plan = Plan.of(series([os.fspath(path) for path in given], allow), choice)
    journal = Journal(target.with_name(f".{target.name}.partial"), plan.text)
    try:
        _work(plan, journal, _way(workers, scheduler), progress)
        _write(plan, journal, target)
    except BaseException:
        journal.close()
        raise
    finally:
        for one in plan.checkpoints:
            one.close()
    journal.remove()
    return Run(target)


def _check_overwritten(target: Path, overwrite: bool) -> None:
    """Only a run file is ever written over: never, say, the checkpoint itself."""
    if not overwrite:
        raise InputError(f"{target}: exists already; give another output, or overwrite=True")
    try:
        Run(target)
    except InputError as error:
        raise InputError(f"not overwritten, {error}; give another output") from None


def output_name(paths: Sequence[PathLike]) -> Path:
    """Where the run file goes by default: beside the first checkpoint, or here for a URL."""
    texts = [os.fspath(path) for path in paths]
    stems = list(dict.fromkeys(_stem(text) for text in (texts[0], texts[-1])))
    folder = Path() if "://" in texts[0] else Path(texts[0]).absolute().parent
    with suppress(ValueError):
        folder = folder.relative_to(Path.cwd())
    return folder / f"{'-to-'.join(stems)}.weights.h5"


def _stem(path: str) -> str:
    place = Path(Place(path).name)
    known = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".json"}
    return (place.stem if place.suffix in known else place.name) or "checkpoint"


# The work


def _way(workers: int, scheduler: str) -> Way:
    if scheduler:
        return partial(cluster, weigh, scheduler=scheduler)
    return partial(processes, weigh, workers=workers) if workers > 1 else partial(here, weigh)


def _work(plan: Plan, journal: Journal, way: Way, progress: Tell) -> None:
    """Do every task that the journal lacks, and pool each checkpoint when its last one is done."""
    done = journal.done()
    remaining = [task for task in plan.tasks if task.number not in done]
    left = [0] * len(plan.checkpoints)
    for task in remaining:
        left[task.checkpoint] += 1
    for checkpoint, count in enumerate(left):
        if not count:  # a kill may have come between its last task and this
            _complete(plan, journal, checkpoint)
    sizes = [plan.nbytes(task) for task in plan.tasks]
    read = sum(sizes) - sum(sizes[task.number] for task in remaining)
    for weighed in way(remaining):
        journal.add(weighed)
        left[weighed.checkpoint] -= 1
        if not left[weighed.checkpoint]:
            _complete(plan, journal, weighed.checkpoint)
        read += sizes[weighed.task]
        progress(read, sum(sizes), f"step {plan.steps[weighed.checkpoint]:,}")


def _complete(plan: Plan, journal: Journal, checkpoint: int) -> None:
    rows = pooled(journal.counts(checkpoint), plan.choice.method, plan.choice.trim)
    journal.complete(checkpoint, rows)


# The file


def _write(plan: Plan, journal: Journal, target: Path) -> None:
    """The run file, whole or not at all."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        writer = RunWriter(part, _header(plan, target))
        try:
            writer.parameters(plan.parameters)
            told: set[tuple[str, str]] = set()
            for checkpoint, step in enumerate(plan.steps):
                rows = journal.rows(checkpoint)
                table = np.array(
                    [rows[p.name].numbers if p.name in rows else UNREAD for p in plan.parameters]
                )
                writer.weights(step, time.time(), dict(zip(METRICS, table.T, strict=True)))
                for gap in _gaps(plan, checkpoint, rows):
                    if gap[::2] not in told:  # a gap holds from its step on
                        told.add((gap[0], gap[2]))
                        writer.coverage(step, "parameter", *gap)
        finally:
            writer.close()
        part.replace(target)
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({first_line(error)}); {AGAIN}") from None
    finally:
        part.unlink(missing_ok=True)


def _gaps(plan: Plan, checkpoint: int, rows: dict[str, Row]) -> Iterator[tuple[str, str, str]]:
    """Parameter, metric and reason of what is missing; a bias has no fit by its nature."""
    for name, row in rows.items():
        if row.reason and row.reason != weibull.NOT_A_MATRIX:
            fit_only = row.reason in weibull.REASONS
            yield name, "weight/weibull_k" if fit_only else "weight", row.reason
    for name, reason in plan.checkpoints[checkpoint].unreadable:
        yield name, "weight", reason


def _header(plan: Plan, target: Path) -> Header:
    quantized = sorted({one.quantized for one in plan.checkpoints if one.quantized})
    attention = _attention(plan)
    settings: dict[str, Any] = {
        "source": "checkpoints",
        "checkpoints": len(plan.checkpoints),
        "format": ", ".join(sorted({one.format for one in plan.checkpoints})),
        "weibull_method": weibull.WeibullFit(
            method=plan.choice.method, trim=plan.choice.trim
        ).protocol,
        **({"quantized": ", ".join(quantized)} if quantized else {}),
        **({"attention": attention} if attention else {}),
        **{k: list(v) for k in ("roles", "match") if (v := getattr(plan.choice, k))},
    }
    return Header(
        metrics=lookup(METRICS),
        name=target.name.removesuffix(".h5").removesuffix(".weights"),
        config=dict(plan.checkpoints[0].config or {}),
        versions={"python": python_version(), "dynscope": _version()},
        settings=settings,
        anatomy=plan.structures[0].anatomy,
    )


def _attention(plan: Plan) -> str:
    """MHA, GQA or MQA, with the heads where the configuration tells them."""
    rows = {p.role: p.shape[0] for p in plan.structures[0].parameters if len(p.shape) == 2}
    if not {"q", "k"} <= rows.keys():
        return ""
    query, key = heads(plan.checkpoints[0].config or {})
    kind = attention_kind(rows["q"], rows["k"], key)
    return f"{kind}, {query} heads, {key} key-value heads" if query else kind


def _version() -> str:
    try:
        return version("dynscope")
    except PackageNotFoundError:
        return "unknown"
