"""What a run says of its weights by role: pooled over layers, the median of the layers, the verdict."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynscope.analysis.published import Neighbour, nearest
from dynscope.analysis.verdicts import (
    BAND,
    NOT_READ,
    UNTRAINED,
    Verdict,
    bands_hold,
    verdict,
    weight_class,
)
from dynscope.reading.run import Run
from dynscope.site import Parameter, pools, undivided
from dynscope.weibull import WeibullFit

Floats = NDArray[np.floating]

POOLED_ROLES = (
    "q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "in", "out", "down", "experts", "router",
    "attention", "cross_attention", "ffn", "mixer", "conv", "adapter",
)  # fmt: skip
"""Roles whose matrices are pooled over layers, in the order of a table."""


@dataclass(frozen=True)
class RoleWeights:
    """All matrices of one role and stack at one step; ``weight_class`` is "transmission", "selection" or "".

    ``k``, ``k_stderr``, ``lam`` and ``r2`` are of all weights together, NaN where the run holds no
    pooled fit; ``median_k`` and ``median_lam`` are medians of the matrices' own, ``median_stderr`` is
    the standard error of the median k by the matrices' scatter. ``below`` counts the matrices whose k
    is below the band, ``clearly`` are the depths of those below by more than 1.96 standard errors;
    ``protocol`` is how all were fitted: by another than the middle 80 % nothing is below a band. The
    verdict is read from the median, which is what the paper's bands are of; all weights together count
    as behind it.
    """

    step: int
    role: str
    weight_class: str
    stack: int
    matrices: int
    weights: int
    protocol: str
    k: float
    k_stderr: float
    lam: float
    r2: float
    median_k: float
    median_stderr: float
    median_lam: float
    below: int
    clearly: tuple[int, ...]
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        said = found.pop("verdict")
        numbers = {
            name: None if isinstance(value, float) and isnan(value) else value
            for name, value in found.items()
        }
        return {**numbers, "verdict": said["word"], "note": said["note"]}


def matrices(parameters: Iterable[Parameter]) -> dict[tuple[str, int], list[Parameter]]:
    """The matrices of the blocks by role and stack, as finely as they are known."""
    found: dict[tuple[str, int], list[Parameter]] = {}
    for one in undivided(parameters):
        if one.depth >= 0 and one.role in POOLED_ROLES and len(one.shape) > 1:
            found.setdefault((one.role, one.stack), []).append(one)
    order = sorted(found, key=lambda key: (key[1], POOLED_ROLES.index(key[0])))
    return {key: found[key] for key in order}


def _merged(parameters: Sequence[Parameter]) -> dict[tuple[str, int], list[Parameter]]:
    """Query, key and value as they are stored, where they were divided: the paper has them so."""
    divided = {one.part_of for one in parameters}
    found: dict[tuple[str, int], list[Parameter]] = {}
    for one in parameters:
        if one.role == "qkv" and one.name in divided and one.depth >= 0 and len(one.shape) > 1:
            found.setdefault((one.role, one.stack), []).append(one)
    return found


def by_role(run: Run, step: int | None = None) -> tuple[RoleWeights, ...]:
    """The table at ``step``, by default the last one at which weights were measured.

    Empty where the run holds no Weibull fits with their errors.
    """
    if not len(run.weight_steps) or not all(f"weight/weibull_{name}" in run for name in _FIT):
        return ()
    return tuple(_rows(run, int(run.weight_steps[-1]) if step is None else step))


_FIT = ("k", "k_standard_error", "lambda", "r2", "n")


def protocol(run: Run) -> str:
    """How the weights of a run were fitted, as `dynscope.weibull.WeibullFit.protocol` says it."""
    return str(run.metadata.settings.get("weibull_method", WeibullFit().protocol))


def _rows(run: Run, step: int) -> Iterator[RoleWeights]:
    at = {name: run[f"weight/weibull_{name}"].sel(weight_step=step).values for name in _FIT}
    place = {parameter.name: i for i, parameter in enumerate(run.parameters)}
    together = {(p.role, p.stack): place[p.name] for p in pools(run.parameters)}
    quantized = str(run.metadata.settings.get("quantized", ""))
    fitted_by = protocol(run)
    band = BAND[0] if bands_hold(fitted_by) else -inf
    for (role, stack), members in {**matrices(run.parameters), **_merged(run.parameters)}.items():
        own = [place[p.name] for p in members]
        each = {name: column[own] for name, column in at.items()}
        fitted = np.isfinite(each["k"])
        if not fitted.any():
            continue
        median = {name: float(np.nanmedian(column)) for name, column in each.items()}
        median |= {
            "k_standard_error": _error_of_median(each["k"], each["k_standard_error"]),
            "n": float(np.nansum(each["n"])),
        }
        whole = together.get((role, stack), own[0] if len(own) == 1 else -1)
        pooled = {name: float(column[whole]) if whole >= 0 else nan for name, column in at.items()}
        yield RoleWeights(
            step=step,
            role=role,
            weight_class=weight_class(role),
            stack=stack,
            matrices=int(fitted.sum()),
            weights=sum(p.numel for p, known in zip(members, fitted, strict=True) if known),
            protocol=fitted_by,
            k=pooled["k"],
            k_stderr=pooled["k_standard_error"],
            lam=pooled["lambda"],
            r2=pooled["r2"],
            median_k=median["k"],
            median_stderr=median["k_standard_error"],
            median_lam=median["lambda"],
            below=int((each["k"] < band).sum()),
            clearly=tuple(
                one.depth
                for one, high in zip(
                    members, each["k"] + 1.96 * each["k_standard_error"], strict=True
                )
                if high < band
            ),
            verdict=verdict(
                role,
                median["k"],
                median["k_standard_error"],
                int(median["n"]),
                median["r2"],
                quantized,
                fitted_by,
            ),
        )


def _error_of_median(k: Floats, errors: Floats) -> float:
    """By the scatter of the matrices, which holds their own errors; never below what these give.

    The scatter is read from the median deviation, so that a few odd layers do not widen it.
    """
    known = np.isfinite(k)
    count = int(known.sum())
    told = errors[known & np.isfinite(errors)]
    own = float(np.sqrt(np.mean(told**2))) if len(told) else 0.0
    scatter = _OF_DEVIATION * float(np.median(np.abs(k[known] - np.median(k[known]))))
    error = _OF_MEDIAN * max(scatter, own) if count > 2 else own
    return float(error / count**0.5)


_OF_MEDIAN = (np.pi / 2) ** 0.5  # of the median of many normal values, in units of the mean's error
_OF_DEVIATION = 1.4826  # standard deviation of normal values, in units of their median deviation


def neighbours(table: Iterable[RoleWeights]) -> tuple[Neighbour, ...]:
    """Published models by their distance from the median k of each role (of the first stack).

    None of verdicts that read nothing, and none where all look untrained.
    """
    first: dict[str, RoleWeights] = {}
    rows = tuple(table)
    if all(row.verdict.word in UNTRAINED for row in rows):
        return ()
    for row in rows:
        if row.verdict.word != NOT_READ:
            first.setdefault(row.role, row)
    k = {role: row.median_k for role, row in first.items()}
    return nearest(k, {role: row.median_stderr for role, row in first.items()})


def lines(run: Run, table: Sequence[RoleWeights]) -> Iterator[str]:
    """The table as text, with what limits it below."""
    if not table:
        yield "No matrix of a block was fitted."
        return
    steps = len(run.weight_steps)
    yield f"step {table[0].step:,}, the last of {steps:,}" if steps > 1 else "Weibull shape by role"
    head = (
        "role", "class", "matrices", "weights", "k of all", "", "median k", "", "below the band", "",
    )  # fmt: skip
    cells = [head]
    cells += [
        (
            f"{one.role} (stack {one.stack})" if one.stack else one.role,
            one.weight_class,
            f"{one.matrices:,}",
            f"{one.weights:,}",
            f"{one.k:.4f}" if isfinite(one.k) else "",
            f"± {one.k_stderr:.4f}" if isfinite(one.k_stderr) else "",
            f"{one.median_k:.4f}",
            f"± {one.median_stderr:.4f}",
            f"{one.below:,} of {one.matrices:,}" if one.verdict.reads_band else "",
            one.verdict.word,
        )
        for one in table
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        middle = "  ".join(f"{cell:>{w}}" for cell, w in zip(row[2:-1], widths[2:-1], strict=True))
        yield f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {middle}  {row[-1]}".rstrip()
    notes: dict[str, list[str]] = {}
    for one in table:
        for note in one.verdict.note.split("; ") if one.verdict.note else ():
            notes.setdefault(note, []).append(one.role)
    for note, roles in notes.items():
        yield f"  {'all' if len(roles) == len(table) else ', '.join(dict.fromkeys(roles))}: {note}"
    yield from _nearest_told(neighbours(table))


def _nearest_told(found: Sequence[Neighbour]) -> Iterator[str]:
    if found:
        yield ""
        yield "Nearest published models, by k:"
        for one in found[:3]:
            over = ", ".join(one.roles)
            yield f"  {one.model.name:12} {one.distance:.4f} ± {one.uncertainty:.4f}  over {over}"
