"""Whatever is killed, and whenever, the file opens and every committed row is right."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from dynscope.errors import InputError
from dynscope.reading.run import Run, load
from tests.format.kills import check_values, ended_steps, start, wait_for, writer_of

TRIALS = 50
LOST_SECONDS = 10.0


def closed(path: Path) -> bool:
    try:
        return load(path).metadata.closed
    except InputError:  # not there yet
        return False


def kill_training(path: Path, delay: float) -> None:
    process = start(path, steps=10**6, delay=0.002)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    process.wait()
    wait_for(lambda: closed(path))
    run = load(path)
    check_values(run)
    safe = [step for step, end in ended_steps(path) if end < killed - 1]
    assert set(safe) <= set(run.steps.tolist())
    assert run.events[-1].kind == "end"
    wait_for(
        lambda: not path.with_name(path.name + ".lock").exists()
    )  # goes after the file is closed


def kill_writer(path: Path, delay: float) -> None:
    process = start(path, steps=10**6, delay=0.002)
    try:
        time.sleep(delay)
        os.kill(writer_of(process), signal.SIGKILL)
        killed = time.monotonic()
        wait_for(lambda: restarted(path))
        later = time.monotonic()
        wait_for(lambda: ended_steps(path)[-1][1] > later)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: closed(path))
    run = load(path)
    check_values(run)
    missing = set(dict(ended_steps(path))) - set(run.steps.tolist())
    ends = dict(ended_steps(path))
    lost = [ends[step] for step in missing if ends[step] < later]
    assert all(killed - LOST_SECONDS < end for end in lost)


def restarted(path: Path) -> bool:
    try:
        return any(event.kind == "writer" for event in load(path).events)
    except InputError:
        return False


def in_parallel(trial: Callable[[Path, float], None], folder: Path, seed: int) -> None:
    """The trials, two at a time: each waits more than it works."""
    from concurrent.futures import ThreadPoolExecutor

    delays = np.random.default_rng(seed).uniform(0, 2.5, TRIALS)
    with ThreadPoolExecutor(4) as pool:
        paths = [folder / f"{i}.h5" for i in range(TRIALS)]
        list(pool.map(trial, paths, delays))


@pytest.mark.slow
def test_50_killed_trainings_leave_closed_files_with_every_row_older_than_a_second(
    tmp_path: Path,
) -> None:
    in_parallel(kill_training, tmp_path, seed=1)


@pytest.mark.slow
def test_50_killed_writers_are_started_again_and_lose_at_most_ten_seconds(tmp_path: Path) -> None:
    in_parallel(kill_writer, tmp_path, seed=2)


def test_a_killed_training_leaves_a_closed_file(tmp_path: Path) -> None:
    kill_training(tmp_path / "run.h5", 1.2)


def test_a_killed_writer_is_started_again(tmp_path: Path) -> None:
    kill_writer(tmp_path / "run.h5", 1.2)


def test_when_both_are_killed_the_file_opens_unclosed_and_can_be_resumed(tmp_path: Path) -> None:
    from dynscope.writing.writer import RunWriter
    from tests.format.producer import header

    path = tmp_path / "run.h5"
    process = start(path, steps=10**6, delay=0.01)
    time.sleep(1.5)
    os.kill(writer_of(process), signal.SIGSTOP)  # or it would see the training end
    child = writer_of(process)
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)
    run = Run(path)
    assert not run.metadata.closed
    assert len(run.steps) > 10
    check_values(run)
    writer = RunWriter(path, header(), resume=True)
    assert writer.last_step == run.last_step
    writer.close()
    again = load(path)
    assert again.metadata.closed
    check_values(again)
    assert again.steps.tolist() == run.steps.tolist()


@pytest.mark.slow
def test_a_writer_killed_while_it_closes_leaves_a_file_that_opens_with_every_row(
    tmp_path: Path,
) -> None:
    for trial, delay in enumerate(np.linspace(0, 0.4, 12)):
        path = tmp_path / f"{trial}.h5"
        process = start(path, steps=10**6, delay=0.001)
        time.sleep(1.5)
        child = writer_of(process)
        process.kill()  # the writer now writes what it has, compresses and swaps
        process.wait()
        time.sleep(delay)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        run = load(path)
        check_values(run)
        assert run.steps.tolist() == list(range(1, len(run.steps) + 1))
        assert len(run.steps) > 100
