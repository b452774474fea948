"""One writer per path, and no path that is locked for ever."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dynscope.errors import InputError
from dynscope.runfile.lock import SILENT, Lock, is_written


def test_a_lock_is_held_until_it_is_released(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "run.h5")
    with pytest.raises(InputError, match="another process writes this run"):
        Lock(tmp_path / "run.h5")
    lock.release()
    Lock(tmp_path / "run.h5").release()
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_process_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    code = "import sys, os; from pathlib import Path; from dynscope.runfile.lock import Lock; "
    code += "Lock(Path(sys.argv[1])); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run.h5")], check=True)
    assert (tmp_path / "run.h5.lock").exists()
    Lock(tmp_path / "run.h5").release()


def test_a_later_process_of_the_same_number_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "run.h5")
    content = json.loads(lock.path.read_text())
    lock.path.write_text(json.dumps(content | {"started": "1"}))
    Lock(tmp_path / "run.h5").release()


@pytest.mark.parametrize("content", ['{"host": "elsewhere/", "pid": 1}', "", "[]", "garbage"])
def test_another_machines_lock_counts_until_it_is_silent_for_long(
    content: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.h5.lock"
    path.write_text(content)
    with pytest.raises(InputError, match="another process"):
        Lock(tmp_path / "run.h5")
    long_ago = time.time() - SILENT - 1
    os.utime(path, (long_ago, long_ago))
    Lock(tmp_path / "run.h5").release()
    assert not path.exists()


def test_a_lock_that_was_taken_over_is_not_released_by_its_first_holder(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "run.h5")
    lock.path.write_text("someone else's")
    lock.release()
    assert lock.path.exists()


def test_a_writer_that_is_closing_its_file_is_waited_for(tmp_path: Path) -> None:
    lock, signs = Lock(tmp_path / "run.h5"), list[float]()
    lock.closing()
    threading.Timer(0.5, lock.release).start()
    began = time.monotonic()
    Lock(tmp_path / "run.h5", lambda: signs.append(1)).release()
    assert 0.4 < time.monotonic() - began < 5
    assert not signs and not list(tmp_path.iterdir())  # a sign is given every ten seconds


def test_a_lock_whose_holder_died_while_closing_is_taken_over(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "run.h5")
    lock.closing()
    content = json.loads(lock.path.read_text())
    lock.path.write_text(json.dumps(content | {"started": "1"}))
    Lock(tmp_path / "run.h5").release()


@pytest.mark.parametrize("ahead", [-2 * SILENT, 2 * SILENT], ids=["behind", "ahead"])
def test_another_machines_clock_does_not_matter(
    ahead: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.h5.lock").write_text('{"host": "elsewhere/", "pid": 1}')
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + ahead)
    with pytest.raises(InputError, match="another process"):
        Lock(tmp_path / "run.h5")


def test_a_reader_knows_whether_a_run_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    assert not is_written(path)
    lock = Lock(path)
    assert is_written(path)
    content = json.loads(lock.path.read_text())
    lock.path.write_text(json.dumps(content | {"started": "1"}))
    assert not is_written(path)
    lock.path.write_text('{"host": "elsewhere/", "pid": 1}')
    assert is_written(path)
