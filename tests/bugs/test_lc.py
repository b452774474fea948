"""Lifecycle of a recording, each case by its id."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dynscope.reading.run import load
from tests.bugs.test_h5 import script
from tests.format.kills import wait_for


@pytest.mark.parametrize(
    "end", ["raise ValueError('broke')", "raise KeyboardInterrupt", "sys.exit(3)", "pass"]
)
def test_lc_02_whatever_ends_the_interpreter_the_rows_are_in_the_file(
    end: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.h5"
    script(f"[record(s) for s in range(1, 7)]\n{end}", str(path))
    run = load(path)
    assert run.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert run.metadata.closed


def test_lc_02_a_feed_that_is_dropped_closes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    script("record(1); del f; time.sleep(2); os._exit(0)", str(path))
    wait_for(lambda: load(path).metadata.closed)
    assert load(path).steps.tolist() == [1]
    assert load(path).events == ()


@pytest.mark.slow
def test_lc_04_200_epochs_of_two_forked_workers_do_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    code = """
        import multiprocessing
        fork = multiprocessing.get_context("fork")
        for epoch in range(200):
            for step in range(10): record(1 + 10 * epoch + step)
            workers = [fork.Process(target=sys.exit) for _ in range(2)]
            [w.start() for w in workers]
            [w.join() for w in workers]
        f.close()
    """
    assert script(code, str(path)).returncode == 0
    assert load(path).steps.tolist() == list(range(1, 2001))


TRAINING = """
import signal, sys, torch, dynscope
from torch import nn
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background ignores it
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scope = dynscope.attach(model, sys.argv[1], optimizer=optimizer, every=1, summary=False)
while True:
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(scope.steps, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", [None, 0.0, 0.1], ids=["once", "twice at once", "twice"])
def test_lc_02_ctrl_c_ends_the_training_and_loses_no_row(
    tmp_path: Path, again: float | None
) -> None:
    """Also an impatient second one, while the first is still closing the file."""
    path = tmp_path / "run.h5"
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    assert process.stdout
    steps = [int(process.stdout.readline()) for _ in range(50)]
    os.killpg(process.pid, signal.SIGINT)
    if again is not None:
        time.sleep(again)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    try:
        rest, told = process.communicate(timeout=60)
    finally:
        process.kill()
    last = [*steps, *map(int, rest.split())][-1]
    assert process.returncode != 0 and "KeyboardInterrupt" in told
    wait_for(lambda: load(path).metadata.closed)
    assert load(path).steps.tolist()[:last] == list(range(1, last + 1))
