"""What a study is, what it finds, and how that is kept: a small JSON file and a figure for each."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

HOLDS = "holds"
DIRECTION = "holds in direction"
FAILS = "does not hold at this size"

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Finding:
    """A claim of a paper beside what was measured; ``verdict`` is one of the three above."""

    paper: str
    claim: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Curve:
    """A line of the study's figure."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Chart:
    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Outcome:
    findings: Sequence[Finding]
    charts: Sequence[Chart] = ()


Study = Callable[[], Outcome]


def verdict(holds: bool, direction: bool) -> str:
    return HOLDS if holds else DIRECTION if direction else FAILS


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median with the smallest and the largest: "1.2 (1.1 to 1.3)"."""
    middle, low, high = (f"{x:.{digits}g}" for x in (median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def keep(name: str, study: Study, seeds: Sequence[int]) -> None:
    """Do the study and write what it found to results/NAME.json, and its figure beside it."""
    torch.set_num_threads(1)  # the same numbers on any machine
    started = time.perf_counter()
    outcome = study()
    minutes = (time.perf_counter() - started) / 60
    RESULTS.mkdir(exist_ok=True)
    kept = {
        "study": name,
        "command": f"python -m examples.studies {name}",
        "seeds": list(seeds),
        "torch": torch.__version__,
        "dynscope": version("dynscope"),
        "minutes": round(minutes, 1),
        **asdict(outcome),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(rounded(kept), indent=1) + "\n", encoding="utf-8")
    for finding in outcome.findings:
        print(f"{finding.verdict}: {finding.claim}\n    {finding.measured}", file=sys.stderr)


def rounded(value: object) -> object:
    """Numbers to four digits, so that the files stay small."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return value
