"""Lifecycle of a recording, each case by its id."""

from pathlib import Path

import pytest

from dynscope.run import load
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
