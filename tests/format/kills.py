"""What the kill tests share: start a producer, find its writer, check what is in its file."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dynscope.reading.run import Run
from tests.format import producer

ROOT = Path(__file__).parents[2]


def start(run: Path, steps: int, delay: float, *extra: str) -> "subprocess.Popen[bytes]":
    """A producer that has recorded its first step."""
    notes = run.with_suffix(".notes")
    notes.unlink(missing_ok=True)
    arguments = [str(run), str(notes), str(steps), str(delay), *extra]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.format.producer", *arguments], cwd=ROOT
    )
    wait_for(lambda: notes.exists() and notes.stat().st_size > 0)
    return process


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def writer_of(process: "subprocess.Popen[bytes]") -> int:
    """Process id of the producer's writer, its only child."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    children = [c for t in threads for c in (t / "children").read_text().split()]
    return int(children[0])


def ended_steps(run: Path) -> list[tuple[int, float]]:
    """Steps that the producer has ended, with the monotonic time of their end."""
    lines = run.with_suffix(".notes").read_text().splitlines()
    pairs = (line.split() for line in lines if line.count(" ") == 1 and line[-1].isdigit())
    return [(int(step), float(end)) for step, end in pairs]


def check_values(run: Run) -> None:
    """Every row that the run shows must be whole and exactly right."""
    for name in producer.METRIC_NAMES:
        array = run[name]
        steps = run.weight_steps if name.startswith("weight/") else run.steps
        if not len(steps):
            continue
        expected = np.stack([producer.values(int(s)) for s in steps])
        if array.ndim == 3:
            expected = np.repeat(expected[..., None], 3, axis=2)
        np.testing.assert_array_equal(array.values, expected.astype(array.dtype), err_msg=name)
    if not len(run.steps) or not run.scalar_names:  # killed between the first row and its scalar
        return
    loss = run.scalars("loss")
    np.testing.assert_array_equal(loss.values, loss["step"].values / 2)
    assert [site.path for site in run.sites] == [f"blocks.{i}" for i in range(producer.SITES)]
