"""Others read a run while it is written, without disturbing the writer."""

import subprocess
import sys
import time
from pathlib import Path

from dynscope.reading.run import load
from tests.format.kills import check_values, start


def test_a_live_run_is_read_again_and_again_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    process = start(path, steps=800, delay=0.005)
    lengths, reads, closed = [], 0, False
    while not closed:
        run = load(path)
        check_values(run)
        lengths.append(len(run.steps))
        reads, closed = reads + 1, run.metadata.closed
        time.sleep(0.1)
    assert process.wait() == 0
    assert reads > 5
    assert lengths == sorted(lengths)
    assert lengths[-1] == 800
    assert len(set(lengths)) > 2


def test_a_loaded_run_keeps_showing_what_it_showed(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    process = start(path, steps=400, delay=0.005)
    time.sleep(1.2)
    run = load(path)
    before = run["activation/variance"]
    assert process.wait() == 0
    assert run["activation/variance"].equals(before)
    assert len(load(path).steps) == 400


def test_a_reader_in_another_process_sees_rows_within_two_seconds(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    process = start(path, steps=10**6, delay=0.01)
    time.sleep(2)
    code = f"import dynscope.reading.run as r; print(len(r.load({str(path)!r}).steps))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    process.kill()
    process.wait()
    assert int(seen.stdout) > 10
