"""The hash that guards HDF5's superblock."""

import struct
from pathlib import Path

import numpy as np
import pytest

from dynscope.reading.run import load
from dynscope.runfile.salvage import CHECKSUM, LENGTH, SUPERBLOCK, lookup3, stated_length
from tests.factories import make_run


def test_lookup3_gives_the_value_that_its_author_published() -> None:
    assert lookup3(b"Four score and seven years ago") == 0x17770551


@pytest.mark.parametrize("behind", [0, 1, 100_000, 3_000_000])
def test_a_killed_file_is_read_though_its_superblock_states_an_older_length(
    tmp_path: Path, behind: int
) -> None:
    path = make_run(tmp_path / "run.h5", blocks=3, steps=30, close=False)
    whole = load(path)["activation/rms"].values
    head = bytearray(path.read_bytes()[:SUPERBLOCK])
    head[LENGTH] = struct.pack("<Q", stated_length(bytes(head)) - behind)
    head[CHECKSUM] = struct.pack("<I", lookup3(bytes(head[: CHECKSUM.start])))
    with path.open("r+b") as file:
        file.write(head)
    assert np.array_equal(load(path)["activation/rms"].values, whole)
