"""What is not a run is refused in one clear line (H5-15, H5-09)."""

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from dynscope.errors import InputError
from dynscope.reading.run import load
from dynscope.runfile.salvage import lookup3
from tests.factories import make_run

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 99\n"


def write(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def other_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("weights", data=[1.0, 2.0], dtype="f8")


def newer(path: Path) -> None:
    make_run(path)
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = 2


def without_committed(path: Path) -> None:
    make_run(path)
    with h5py.File(path, "r+") as file:
        del file["committed"]


def without_created(path: Path) -> None:
    make_run(path)
    with h5py.File(path, "r+") as file:
        del file.attrs["created"]


def half(path: Path) -> None:
    os.truncate(make_run(path), path.stat().st_size // 2)


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "no such file"),
    "directory": (lambda path: path.mkdir(), "directory"),
    "empty": (write(b""), "empty"),
    "text": (write(b"hello"), "not an HDF5 file"),
    "web page": (write(b"\n<!DOCTYPE html><html>404"), "web page"),
    "git-lfs pointer": (write(POINTER), "git lfs pull"),
    "signature only": (write(b"\x89HDF\r\n\x1a\n"), "not an HDF5 file"),
    "96 bytes": (write(b"\x89HDF\r\n\x1a\n" + b"\0" * 88), "damaged or truncated"),
    "truncated": (half, "truncated"),
    "other HDF5": (other_hdf5, "not a dynscope run"),
    "newer format": (newer, "upgrade"),
    "without committed": (without_committed, "/committed"),
    "without created": (without_created, "created"),
}


@pytest.mark.parametrize("case", CASES)
def test_h5_15_what_is_not_a_run_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    make, words = CASES[case]
    path = tmp_path / "run.h5"
    make(path)
    with pytest.raises(InputError) as refusal:
        load(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert "\n" not in message
    assert refusal.value.exit_code == 1


def read_all(path: Path) -> None:
    run = load(path)
    _ = [run[metric.name].values for metric in run.metrics]
    _ = run.sites, run.parameters, run.events, run.coverage, run.scalar_names


def test_a_shortened_live_file_is_refused_not_read_as_zeros(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole.h5", close=False).read_bytes()
    path = tmp_path / "run.h5"
    for share in (0.01, 0.03, 0.5):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(InputError, match="truncated"):
            read_all(path)


def test_a_live_file_is_read_whole_though_its_last_and_uncommitted_bytes_are_missing(
    tmp_path: Path,
) -> None:
    whole = make_run(tmp_path / "whole.h5", close=False)
    content = bytearray(whole.read_bytes())
    content[28:36] = struct.pack("<Q", len(content) + 100_000)  # what a flush cut short had begun
    content[44:48] = struct.pack("<I", lookup3(bytes(content[:44])))
    path = tmp_path / "run.h5"
    path.write_bytes(content)
    short, complete = load(path), load(whole)
    for name in ("activation/variance", "massive/channel", "weight/norm", "clock/time"):
        assert short[name].equals(complete[name])
    assert short.sites == complete.sites


def test_damage_inside_is_an_error_of_the_file_not_a_crash(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run.h5")
    content = bytearray(path.read_bytes())
    content[len(content) // 4 : len(content) // 2] = b"\xff" * (len(content) // 4)
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        read_all(path)


@pytest.mark.slow
@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("damage", ["cut", "one bit", "many bits", "noise"])
def test_h5_15_a_file_damaged_anywhere_is_read_or_refused_but_never_hangs_or_crashes(
    damage: str, close: bool, tmp_path: Path
) -> None:
    """In a process of its own, which a crash or an endless wait of HDF5's would end."""
    whole = make_run(tmp_path / "whole.h5", blocks=2, steps=3, close=close).read_bytes()
    random = np.random.default_rng(0)
    for i in range(12):
        content = np.frombuffer(whole, np.uint8).copy()
        at = random.integers(len(content), size={"one bit": 1, "many bits": 30}.get(damage, 0))
        content[at] ^= np.uint8(1) << random.integers(8, size=len(at)).astype(np.uint8)
        if damage == "noise":
            piece = content[int(random.integers(len(content))) :][:5000]
            piece[:] = random.integers(256, size=len(piece))
        end = int(random.integers(len(content))) if damage == "cut" else None
        (tmp_path / f"{i}.h5").write_bytes(content[:end].tobytes())
    code = """
import sys
from pathlib import Path
from dynscope.errors import InputError
from tests.format.test_bad_files import read_all
for i in range(12):
    try:
        read_all(Path(sys.argv[1]) / f"{i}.h5")
    except InputError as error:
        assert "\\n" not in str(error)
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
