"""One test for each known way in which command lines annoy."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.factories import make_run


def dynscope(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynscope", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    make_run(found / "a.h5", blocks=1, steps=2)
    (found / "text.h5").write_text("not a run")
    return found


@pytest.mark.parametrize("name", ["nope.h5", "text.h5", "."])
def test_cl_01_bad_input_is_one_line_and_exit_code_1(folder: Path, name: str) -> None:
    done = dynscope("report", name, cwd=folder)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert name in done.stderr and "Traceback" not in done.stderr


def test_cl_02_nothing_and_nonsense_are_wrong_usage_and_help_is_not(folder: Path) -> None:
    nothing, nonsense = dynscope(cwd=folder), dynscope("repotr", cwd=folder)
    assert (nothing.returncode, nonsense.returncode) == (2, 2)
    assert "report" in nothing.stdout + nothing.stderr
    assert "repotr" in nonsense.stderr
    for arguments in (["--help"], ["-h"], ["report", "--help"]):
        done = dynscope(*arguments, cwd=folder)
        assert done.returncode == 0 and done.stdout


def test_cl_04_a_reader_that_leaves_early_is_no_error(folder: Path) -> None:
    command = f"{sys.executable} -m dynscope info --json a.h5 | head -c 1"
    done = subprocess.run(
        command, cwd=folder, shell=True, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{" and done.stderr == ""


@pytest.mark.parametrize("name", ["with space.h5", "名前.h5", "-x.h5"])
def test_cl_06_any_path_works(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / "a.h5").read_bytes())
    done = dynscope("report", "--", name, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / f"{name.removesuffix('.h5')}.report.html").exists()


def test_cl_07_help_is_quick_and_light(folder: Path) -> None:
    code = (
        "import sys; from dynscope.cli import main; sys.argv = ['dynscope', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'plotly', 'h5py', 'xarray', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.perf_counter() - start < 2


def test_cl_08_compare_takes_two_or_more_in_the_order_given(folder: Path) -> None:
    one = dynscope("compare", "a.h5", cwd=folder)
    assert one.returncode == 2 and len(one.stderr.splitlines()) == 1
    make_run(folder / "b.h5", blocks=1, steps=2, seed=1, name="other")
    three = dynscope("compare", "b.h5", "a.h5", "b.h5", "-o", "three.html", cwd=folder)
    assert three.returncode == 0, three.stderr
    page = (folder / "three.html").read_text()
    assert page.index(">a <b>b</b>") < page.index(">b <b>synthetic</b>") < page.index(">c <b>b</b>")
