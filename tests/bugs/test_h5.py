"""The run file in the situations that lose data elsewhere, each by its id."""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest

from dynscope.catalogue import METRICS, Metric
from dynscope.errors import InputError
from dynscope.reading.run import load
from dynscope.runfile.schema import Header
from dynscope.site import Parameter, Site
from dynscope.writing.feed import Feed
from dynscope.writing.writer import RunWriter
from tests.factories import make_run
from tests.format.kills import check_values, start, wait_for, writer_of

ROOT = Path(__file__).parents[2]
VARIANCE = Header(metrics=(METRICS["activation/variance"],))


def rms(step: int, sites: int = 2) -> dict[str, np.ndarray[Any, Any]]:
    return {"activation/variance": np.full(sites, step, np.float32)}


def two_sites(writer: Feed | RunWriter) -> None:
    writer.sites([Site("a", "block", 0, 0), Site("b", "block", 0, 1)])


def script(body: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a training script with a feed `f` of two sites on the path of its first argument."""
    head = """
        import os, sys, signal, time
        import numpy as np
        from dynscope.catalogue import METRICS
        from dynscope.writing.feed import Feed
        from dynscope.runfile.schema import Header
        from dynscope.site import Site
        f = Feed(sys.argv[1], Header((METRICS["activation/variance"],)))
        f.sites([Site("a", "block"), Site("b", "block")])
        def record(step): f.row(step, 0.0, {"activation/variance": np.full(2, step, "f4")})
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "cwd": ROOT}
    command = [sys.executable, "-c", code, *arguments]
    done: subprocess.CompletedProcess[str]
    done = subprocess.run(command, check=False, **(settings | options))
    return done


def closed(path: Path) -> bool:
    return load(path).metadata.closed


def test_h5_02_a_file_left_by_a_killed_writer_opens_without_tools(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run.h5", close=False)
    with pytest.raises(OSError, match="already open for write"):
        h5py.File(path, "r")
    run = load(path)
    assert not run.metadata.closed
    assert len(run.steps) == 10


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGTERM)", "os._exit(0)"])
def test_h5_04_sigterm_and_os_exit_lose_no_row(end: str, tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    script(f"[record(s) for s in range(1, 101)]; time.sleep(1); {end}", str(path))
    wait_for(lambda: closed(path))
    assert load(path).steps.tolist() == list(range(1, 101))


def test_h5_05_a_path_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    process = start(path, steps=10**6, delay=0.005)
    for choice in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(InputError, match="another process writes|exists already"):
            Feed(path, VARIANCE, **choice)
    process.kill()
    process.wait()
    wait_for(lambda: closed(path))
    run = load(path)
    check_values(run)
    assert run.steps.tolist() == list(range(1, len(run.steps) + 1))


def test_h5_06_two_writers_are_kept_apart_without_hdf5_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "FALSE")
    test_h5_05_a_path_that_another_process_writes_is_refused(tmp_path)


def test_h5_09_an_unwritable_place_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder.h5").mkdir()
    (tmp_path / "file").write_text("no folder")
    for path, words in [
        (tmp_path / "nope" / "run.h5", "does not exist"),
        (tmp_path / "folder.h5", "directory"),
        (tmp_path / "file" / "run.h5", "does not exist"),
        (Path("/dev/full"), "not a regular file"),
        (Path("/proc/run.h5"), "cannot be written"),
    ]:
        for overwrite, resume in ((False, False), (True, False), (False, True)):
            with pytest.raises(InputError, match=words) as refusal:
                RunWriter(path, VARIANCE, overwrite=overwrite, resume=resume)
            assert str(path) in str(refusal.value)
    with pytest.raises(InputError, match="does not exist"):
        Feed(tmp_path / "nope" / "run.h5", VARIANCE)


def test_h5_10_3000_sites_take_under_2_mb_and_50_ms_a_row(tmp_path: Path) -> None:
    names = [name for name in METRICS if name.startswith("activation/")][:10]
    writer = RunWriter(tmp_path / "run.h5", Header(tuple(METRICS[name] for name in names)))
    writer.sites([Site(f"blocks.{i}", "block", 0, i) for i in range(3000)])
    random = np.random.default_rng(0)
    writer.row(1, 0.0, {name: random.normal(size=3000) for name in names})
    writer.flush()
    took = []
    for step in range(2, 11):
        row = {name: random.normal(size=3000) for name in names}
        begun = time.perf_counter()
        writer.row(step, 0.0, row)
        writer.flush()
        took.append(time.perf_counter() - begun)
    writer.close()
    assert (tmp_path / "run.h5").stat().st_size < 2e6
    assert sorted(took)[len(took) // 2] < 0.05


NAMES = ["", "a/b", "..", ".", "50%", "layer 1", "größe", "層", "\ud800", "nul\0nul", "end\0",
         'quo"te\\', "\x1e1,2", "block", "block/0", "x" * 256, "x" * 257, "é" * 5000,
         "\n", "\\u0000", " blank "]  # fmt: skip


def test_h5_12_names_are_data_and_come_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    feed = Feed(path, VARIANCE)
    feed.sites([Site(name, "block", type=name, aliases=(name, "b")) for name in NAMES])
    feed.parameters([Parameter(name, "ffn", shape=(2, 3)) for name in NAMES])
    for name in NAMES:
        feed.scalars(1, 0.0, {name: 2.0})
        feed.event(1, 0.0, "note", name)
        feed.coverage(1, "site", name, "activation/mean", name)
    feed.row(1, 0.0, {"activation/variance": np.arange(len(NAMES))})
    feed.close()
    run = load(path)
    assert [site.path for site in run.sites] == NAMES
    assert [site.type for site in run.sites] == NAMES
    assert [site.aliases[0] for site in run.sites] == NAMES
    assert [p.name for p in run.parameters] == NAMES
    assert list(run.scalar_names) == NAMES
    assert [event.message for event in run.events] == NAMES
    assert [gap.path for gap in run.coverage] == NAMES
    assert [gap.reason for gap in run.coverage] == NAMES


def test_h5_13_forked_workers_neither_hang_nor_hold_nor_harm_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    done = script(
        """
        import multiprocessing
        fork = multiprocessing.get_context("fork")
        def work():
            record(10**6)   # a worker's calls do nothing
            f.close()
        lingering = fork.Process(target=time.sleep, args=(60,), daemon=False)
        for step in range(1, 201):
            record(step)
            if step % 20 == 0:
                workers = [fork.Process(target=work) for _ in range(2)]
                [w.start() for w in workers]
                [w.join() for w in workers]
        lingering.start()
        begun = time.monotonic()
        f.close()
        print(time.monotonic() - begun, f.failure)
        lingering.kill()
        """,
        str(path),
    )
    seconds, failure = done.stdout.split()
    assert failure == "None", done
    assert float(seconds) < 20
    assert load(path).steps.tolist() == list(range(1, 201))


def test_h5_14_rows_from_several_threads_all_arrive(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    feed = Feed(path, VARIANCE)
    two_sites(feed)

    def work(first: int) -> None:
        for step in range(first, 800, 4):
            feed.row(step, 0.0, rms(step))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    feed.close()
    run = load(path)
    assert run.steps.tolist() == list(range(800))
    assert run["activation/variance"].values[:, 1].tolist() == list(range(800))


def test_h5_17_file_systems_without_locks_are_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = h5py.File

    def without_locks(*arguments: Any, **options: Any) -> h5py.File:
        if options.get("locking") is not False:
            raise OSError(errno.ENOLCK, "No locks available")
        return opened(*arguments, **options)

    monkeypatch.setattr(h5py, "File", without_locks)
    assert len(load(make_run(tmp_path / "run.h5")).steps) == 10


@pytest.mark.parametrize(
    "order", ["netCDF4, dynscope.writing.feed", "dynscope.writing.feed, netCDF4"]
)
def test_h5_18_another_hdf5_library_in_the_training_process_does_no_harm(
    order: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.h5"
    code = f"""
        import {order}
        assert "h5py" not in sys.modules
        record(1)
        f.close()
        netCDF4.Dataset(sys.argv[1]).close()
        from dynscope.reading.run import load
        print(load(sys.argv[1])["activation/variance"].values.tolist())
    """
    done = script(code, str(path))
    assert done.stdout.strip() == "[[1.0, 1.0]]", done.stderr


def test_h5_19_nothing_warns(tmp_path: Path) -> None:
    code = (
        "from tests.factories import make_run; from dynscope.reading.run import load; "
        f"r = load(make_run({str(tmp_path / 'run.h5')!r})); r.to_xarray()"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)


def test_h5_20_the_same_cell_run_twice_is_refused_or_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    first = Feed(path, VARIANCE)
    two_sites(first)
    with pytest.raises(InputError, match="this process is recording"):
        Feed(path, VARIANCE)
    first.row(1, 0.0, rms(1))
    second = Feed(path, VARIANCE, resume=True)
    assert second.last_step == 1
    first.row(2, 0.0, rms(2))  # goes nowhere, raises nothing
    two_sites(second)
    second.row(3, 0.0, rms(3))
    second.close()
    first.close()
    assert load(path).steps.tolist() == [1, 3]
    third = Feed(path, VARIANCE, overwrite=True)
    third.close()
    assert load(path).steps.tolist() == []


@pytest.mark.slow
def test_h5_21_long_runs_stay_near_4_bytes_a_number_and_read_fast(tmp_path: Path) -> None:
    names = [name for name in METRICS if name.startswith("activation/")][:10]
    path = tmp_path / "run.h5"
    writer = RunWriter(path, Header(tuple(METRICS[name] for name in names)))
    writer.sites([Site(f"blocks.{i}", "block", 0, i) for i in range(300)])
    random = np.random.default_rng(0)
    rows = [{name: random.normal(size=300).astype("f4") for name in names} for _ in range(50)]
    steps = 10_000
    for step in range(1, steps + 1):
        writer.row(step, 0.0, rows[step % 50])
    writer.close()
    assert path.stat().st_size < 1.05 * 10 * 300 * 4 * 1.2 * steps
    begun = time.perf_counter()
    values = load(path)["activation/variance"].values
    assert time.perf_counter() - begun < 2
    np.testing.assert_array_equal(values[-1], rows[steps % 50]["activation/variance"])


# A full disk: what is committed stays, training goes on


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))


def test_a_full_disk_ends_recording_not_training(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    done = script(
        """
        import logging; logging.basicConfig()
        from dynscope.reading.run import load
        step, waited_until = 0, time.monotonic() + 30
        def train():
            global step
            step += 1
            record(step)
            time.sleep(0.002)
        while len(load(sys.argv[1]).steps) <= 10 and time.monotonic() < waited_until:
            train()
        while not f.failure and time.monotonic() < waited_until:
            train()
            f.event(step, 0.0, "note", os.urandom(2000).hex())
        train()
        f.close()
        print("trained on to", step, f.failure)
        """,
        str(path),
        preexec_fn=limit_file_size,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("trained on"), done.stderr
    assert "writing failed" in done.stdout
    assert "training goes on" in done.stderr
    run = load(path)
    assert not run.metadata.closed
    steps = run.steps
    assert 10 < len(steps) < int(done.stdout.split()[3])
    assert run["activation/variance"].values[:, 0].tolist() == steps.tolist()
    assert not list(tmp_path.glob("*.lock"))


def test_a_nearly_full_disk_ends_recording_before_hdf5_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "run.h5", VARIANCE)
    two_sites(writer)
    writer.row(1, 0.0, rms(1))
    writer.flush()
    full = mock.Mock(f_bavail=1, f_frsize=4096, f_blocks=10**6)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    writer.row(2, 0.0, rms(2))
    with pytest.raises(OSError, match="no space left"):
        writer.flush()
    writer.close()
    assert load(tmp_path / "run.h5").steps.tolist() == [1]


def test_without_room_for_a_second_copy_the_file_is_closed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.h5"
    writer = RunWriter(path, VARIANCE)
    two_sites(writer)
    writer.row(1, 0.0, rms(1))
    writer.flush()
    full = mock.Mock(f_bavail=1, f_frsize=4096, f_blocks=10**6)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    writer.close()
    assert load(path).metadata.closed
    with h5py.File(path, "r") as file:
        assert file["activation/variance"].compression is None
    assert load(path)["activation/variance"].values.tolist() == [[1, 1]]


# The writer process and its surroundings


def test_ctrl_c_and_sigterm_to_the_writer_do_not_end_it(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    process = start(path, steps=300, delay=0.005)
    child = writer_of(process)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        os.kill(child, number)
    assert os.getpgid(child) != os.getpgid(process.pid)
    assert process.wait() == 0
    assert len(load(path).steps) == 300
    assert load(path).metadata.closed


def test_a_pipe_behind_the_training_ends_with_it_while_the_writer_still_works(
    tmp_path: Path,
) -> None:
    code = """
        import signal
        record(1)
        time.sleep(0.5)
        child = int(open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()[0])
        os.kill(child, signal.SIGSTOP)
        print(child, flush=True)
        os._exit(0)
    """
    begun = time.monotonic()
    done = script(code, str(tmp_path / "run.h5"))  # returns when nobody holds its outputs
    assert time.monotonic() - begun < 20
    os.kill(int(done.stdout), signal.SIGCONT)
    wait_for(lambda: closed(tmp_path / "run.h5"))


def test_the_writer_is_not_fooled_by_modules_beside_the_training_script(tmp_path: Path) -> None:
    for name in ("h5py", "secrets", "xarray"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')")
    train = tmp_path / "train.py"
    train.write_text(
        "import sys; sys.path.append(sys.argv[2])\n"
        "from dynscope.catalogue import METRICS\n"
        "from dynscope.writing.feed import Feed\n"
        "from dynscope.runfile.schema import Header\n"
        "f = Feed(sys.argv[1], Header((METRICS['gradient/norm'],)))\n"
        "f.event(1, 0.0, 'note', 'hello'); f.close(); print(f.failure)\n"
    )
    path = tmp_path / "run.h5"
    command = [sys.executable, str(train), str(path), str(ROOT)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "None\n", done.stderr
    assert [event.message for event in load(path).events] == ["hello"]


def test_where_no_process_can_be_started_a_thread_writes_and_the_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    feed = Feed(tmp_path / "run.h5", VARIANCE)
    two_sites(feed)
    feed.row(1, 0.0, rms(1))
    feed.close()
    run = load(tmp_path / "run.h5")
    assert run["activation/variance"].values.tolist() == [[1, 1]]
    assert run.metadata.closed
    assert run.events[0].kind == "writer"
    assert "thread" in run.events[0].message


def test_a_stalled_writer_never_blocks_and_what_is_dropped_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynscope.writing.feed.WAITING", 300_000)
    path = tmp_path / "run.h5"
    feed = Feed(path, VARIANCE)
    child = feed._pump.link._process.pid  # type: ignore[attr-defined]
    two_sites(feed)
    feed.row(1, 0.0, rms(1))
    os.kill(child, signal.SIGSTOP)
    slowest = 0.0
    for step in range(2, 3000):
        begun = time.perf_counter()
        feed.row(step, 0.0, rms(step))
        slowest = max(slowest, time.perf_counter() - begun)
    os.kill(child, signal.SIGCONT)
    feed.close()
    run = load(path)
    assert slowest < 0.5
    assert 2 < len(run.steps) < 3000
    dropped = sum(int(g.reason.split()[0]) for g in run.coverage if g.kind == "rows")
    assert len(run.steps) + dropped == 2999


def test_an_own_metric_keeps_its_explanation_and_bad_names_are_refused(tmp_path: Path) -> None:
    own = Metric("mine/skew", ("step", "site"), "1", "third moment", "zero is even", "me")
    writer = RunWriter(tmp_path / "run.h5", Header(metrics=(own,)))
    two_sites(writer)
    writer.row(1, 0.0, {"mine/skew": np.array([1, 2])})
    writer.close()
    run = load(tmp_path / "run.h5")
    assert run.metrics == (own,)
    assert run["mine/skew"].attrs["definition"] == "third moment"
    for name in ("clock/mine", "a", "a/b/c", "a/..", "sites/x", "committed/x"):
        with pytest.raises(InputError, match="does not fit"):
            Header(metrics=(Metric(name, ("step", "site"), "", "", "", ""),))
