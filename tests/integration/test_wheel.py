"""What is published holds every file of the three rooms, and puts one name into site-packages."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ROOMS = {"dynscope": "dynscope/", "hooks": "dynscope/hooks/", "reports": "dynscope/reports/"}
NOT_SHIPPED = {".md"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, and a wheel built from it."""
    source, out = tmp_path_factory.mktemp("build") / "source", tmp_path_factory.mktemp("dist")
    ignore = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "demo")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return out


def rooms_files() -> Iterator[str]:
    """Every shipped file of the rooms by its place in the package."""
    for room, place in ROOMS.items():
        for file in (ROOT / room).rglob("*"):  # which follows no links to other rooms
            compiled = file.parent.name == "__pycache__"
            if file.is_file() and file.suffix not in NOT_SHIPPED and not compiled:
                yield place + file.relative_to(ROOT / room).as_posix()


def test_the_wheel_holds_exactly_the_files_of_the_rooms(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == set(rooms_files())


def test_the_source_distribution_holds_the_rooms_under_their_own_names(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    places = {place: room for room, place in reversed(ROOMS.items())}
    for name in rooms_files():
        place = max((p for p in places if name.startswith(p)), key=len)
        assert f"{places[place]}/{name.removeprefix(place)}" in names


def test_the_installed_wheel_runs(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([sys.executable, *install, str(wheel)], check=True)
    assert {path.name for path in tmp_path.iterdir()} >= {"dynscope"}
    assert not {"hooks", "reports"} & {path.name for path in tmp_path.iterdir()}
    code = f"import dynscope; assert dynscope.__file__.startswith({str(tmp_path)!r})"
    where = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=where, check=True)
