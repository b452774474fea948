"""The command line writes what it says, where it says, and nothing else."""

import json
import re
from pathlib import Path

import pytest

import dynscope
from dynscope.catalogue import bundle
from dynscope.cli import main
from dynscope.runfile.schema import Header
from dynscope.writing.writer import RunWriter
from tests.factories import make_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run("run.h5", blocks=2, steps=3)
    return Path("run.h5")


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["dynscope", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_report_names_its_page_after_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "report", "run.h5") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Wrote run.report.html (") and first.endswith(" MB)")
    assert "dynscope compare run.h5" in second
    assert Path("run.report.html").read_text().startswith("<!doctype html>")


def test_an_existing_page_is_kept_unless_forced(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.report.html").write_text("mine")
    assert command(monkeypatch, "report", "run.h5") == 1
    assert "--force" in capsys.readouterr().err
    assert Path("run.report.html").read_text() == "mine"
    assert command(monkeypatch, "report", "run.h5", "--force") == 0
    assert Path("run.report.html").read_text() != "mine"


def test_a_run_is_never_written_over(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.read_bytes()
    assert command(monkeypatch, "report", "run.h5", "-o", "./run.h5", "--force") == 2
    assert "is the run itself" in capsys.readouterr().err
    assert run.read_bytes() == before


@pytest.mark.parametrize(("output", "code"), [("no/such/page.html", 1), (".", 2)])
def test_an_impossible_output_is_refused_before_any_work(
    run: Path, monkeypatch: pytest.MonkeyPatch, output: str, code: int
) -> None:
    monkeypatch.setattr("dynscope.reading.run.load", lambda path: pytest.fail("the run was read"))
    assert command(monkeypatch, "report", "run.h5", "-o", output) == code


def test_compare_takes_labels_and_names_its_page_after_the_runs(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "compare", "run.h5", "run.h5", "-l", "old", "-l", "new") == 0
    assert "Wrote run-run.compare.html" in capsys.readouterr().out
    assert "old and new" in Path("run-run.compare.html").read_text()


def test_info_prints_the_tree_and_what_is_in_the_file(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "info", "run.h5") == 0
    text = capsys.readouterr().out
    assert "synthetic: closed" in text
    assert re.search(r"blocks\.0-1 +block +Block", text)
    assert "activation/variance" in text and "model units squared" in text
    assert "1 to 3, 3 recorded" in text


def test_info_prints_the_whole_model_also_what_was_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = "1 block\nblocks.0  block  Block\n  q       q      Linear"
    path = tmp_path / "run.h5"
    RunWriter(path, Header(bundle("light"), anatomy=tree)).close()
    assert command(monkeypatch, "info", str(path)) == 0
    text = capsys.readouterr().out
    assert "Model: 1 block, 0 sites recorded" in text
    assert "  blocks.0  block  Block\n    q       q      Linear\n" in text


def test_info_says_when_a_run_was_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "killed.h5", blocks=1, steps=2, close=False)
    assert command(monkeypatch, "info", str(path)) == 0
    assert "not closed" in capsys.readouterr().out


def test_info_as_json_is_what_python_reads(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "info", "run.h5", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["closed"] is True
    assert found["steps"] == {"recorded": 3, "first": 1, "last": 3, "weights": 3}
    assert [site["path"] for site in found["sites"]] == [s.path for s in dynscope.load(run).sites]


def test_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == f"dynscope {dynscope.__version__}"


@pytest.mark.parametrize("format", ["csv", "parquet", "json", "netcdf"])
def test_export_names_its_file_after_the_run_and_says_how_to_read_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    assert command(monkeypatch, "export", "run.h5", "--to", format) == 0
    first, second = capsys.readouterr().out.splitlines()
    name = f"run.{'nc' if format == 'netcdf' else format}"
    assert first.startswith(f"Wrote {name} (") and f"({name!r}" in second
    assert command(monkeypatch, "export", "run.h5", "--to", format) == 1
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["report", "info", "export"])
@pytest.mark.parametrize("place", [".", "/", "folder.h5"])
def test_a_directory_is_refused_in_one_line(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    place: str,
) -> None:
    Path("folder.h5").mkdir()
    assert command(monkeypatch, verb, place) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"dynscope: {place}: is a directory, not a run file"


def test_export_takes_the_format_from_the_outputs_name(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(monkeypatch, "export", "run.h5", "-o", "rms.json", "-m", "activation/rms") == 0
    assert list(json.loads(Path("rms.json").read_text())["values"]) == ["activation/rms"]


def test_an_export_that_fails_leaves_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "export", "run.h5", "-m", "no/such") == 1
    assert "no metric fits 'no/such'" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["run.h5"]
