"""A thousand SIGKILLs at random moments: python -m benchmarks.kills [--trials 1000]

A third of them hits the training, a third the writer process (which is then started again), a third
both at once. After each the file must open, every row that it shows must be exactly what was recorded,
and no more may be missing than is promised: of a killed training nothing that ended a second before, of
a killed writer at most ten seconds. The training records rows as fast as one every 2 ms.
"""

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import typer
from rich.progress import track

from dynscope.errors import InputError
from dynscope.reading.run import load
from tests.format.kills import check_values, ended_steps, start, writer_of
from tests.format.test_kills import LOST_SECONDS, kill_training, kill_writer

LONGEST = 2.5  # seconds after the first recorded step at which the kill comes at the latest


def kill_both(path: Path, delay: float) -> None:
    process = start(path, steps=10**6, delay=0.002)
    time.sleep(delay)
    with suppress(ProcessLookupError):
        os.kill(writer_of(process), signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    process.wait()
    run = load(path)
    check_values(run)
    assert not run.metadata.closed
    safe = [step for step, end in ended_steps(path) if end < killed - LOST_SECONDS]
    assert set(safe) <= set(run.steps.tolist())


KILLS: dict[str, Callable[[Path, float], None]] = {
    "the training": kill_training,
    "the writer": kill_writer,
    "both": kill_both,
}


def trial(number: int, seed: int) -> tuple[str, str]:
    """What was killed, and what became of the file: "right", or what is wrong with it."""
    kind = list(KILLS)[number % len(KILLS)]
    delay = random.Random(f"{seed} {number}").uniform(0, LONGEST)
    with tempfile.TemporaryDirectory() as folder:
        try:
            KILLS[kind](Path(folder) / "run.h5", delay)
        except InputError as error:
            return kind, f"unreadable: {error}"
        except AssertionError as error:
            return kind, f"wrong: {str(error).splitlines()[0] if str(error) else 'rows missing'}"
    return kind, "right"


def main(trials: int = 1000, seed: int = 0, at_once: int = 6) -> None:
    """Kill a recording training, or its writer, or both, again and again."""
    started = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        jobs = [pool.submit(trial, number, seed) for number in range(trials)]
        found = Counter(job.result() for job in track(jobs, description="Killing"))
    print(f"{trials} kills in {(time.monotonic() - started) / 60:.0f} min")
    print("| killed | files | outcome |\n| --- | --- | --- |")
    for (kind, outcome), count in sorted(found.items()):
        print(f"| {kind} | {count} | {outcome} |")


if __name__ == "__main__":
    typer.run(main)
