"""Checkpoints that are damaged, hostile or something else: one clear line, no code run, little memory."""

import io
import json
import os
import pickle
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dynscope.checkpoints import series
from dynscope.errors import InputError

HEADER: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]},
}


def safetensors(header: Any, data: int = 32, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def changed(name: str, **entry: Any) -> bytes:
    return safetensors(HEADER | {name: HEADER.get(name, {}) | entry})


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (b"1234567", "7 bytes"),
    "cut off": (safetensors(HEADER, 20), "truncated: 20 of 32 bytes"),
    "header beyond the file": (safetensors(HEADER, length=5000), "claims 5,000 bytes"),
    "header beyond all files": (safetensors(HEADER, length=2**63), "claims"),
    "header is no JSON": (safetensors(b"{'a': 1}"), "no JSON"),
    "header is no text": (safetensors(b"\xff\xfe\xfd\xfc"), "no JSON"),
    "header is a list": (safetensors([1, 2]), "no object"),
    "header is nested": (safetensors(b"[" * 100_000), "no JSON"),
    "a name twice": (safetensors(b'{"a": 1, "a": 2}'), "there twice"),
    "an entry is no object": (safetensors({"a": 3}), "lacks dtype"),
    "overlapping": (changed("b", data_offsets=[20, 28]), "'b' overlaps 'a'"),
    "a gap": (changed("b", data_offsets=[28, 36]), "a gap of 4 bytes before 'b'"),
    "more behind": (safetensors(HEADER, 40), "8 bytes behind"),
    "backwards": (changed("b", data_offsets=[32, 24]), "sound"),
    "negative": (changed("a", shape=[-2, -3]), "cannot be"),
    "not whole": (changed("a", shape=[2.0, 3]), "cannot be"),
    "true is no number": (changed("a", shape=[True, 6]), "cannot be"),
    "huge": (changed("a", shape=[2**60, 2**60]), "cannot be|impossible"),
    "another size": (changed("a", shape=[2, 4]), "has 24 bytes where F32 .* takes 32"),
    "NaN": (safetensors(b'{"a": NaN}'), "no JSON"),
    "offsets of three": (changed("a", data_offsets=[0, 12, 24]), "cannot be"),
    "metadata is no object": (safetensors({"__metadata__": 3, **HEADER}), "__metadata__"),
    "a web page": (b"<!DOCTYPE html><html><head><title>Sign in</title>", "web page"),
    "an LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "git lfs pull",
    ),
}


def refused(path: Path, match: str | None = None) -> str:
    with pytest.raises(InputError, match=match) as error:
        series([str(path)])
    line = str(error.value)
    assert "\n" not in line and path.name in line and len(line) < 400 + len(str(path))
    return line


@pytest.mark.parametrize("case", BAD)
def test_a_bad_safetensors_file_is_one_clear_line(tmp_path: Path, case: str) -> None:
    content, match = BAD[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path / "model.safetensors", match)


def test_the_sound_twin_of_the_bad_files_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(HEADER))
    (one,) = series([str(path)])
    assert {t.name: t.shape for t in one.tensors} == {"a": (2, 3), "b": (4,)}


def test_an_odd_dtype_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(changed("b", dtype="F4"))
    (one,) = series([str(path)])
    assert dict(one.unreadable) == {"b": "its dtype 'F4' is not read here"}
    assert [tensor.name for tensor in one.tensors] == ["a"]


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("form", ["zip", "old", "bare pickle", "new pickle", "distributed"])
def test_code_in_a_pickle_is_never_run(tmp_path: Path, form: str) -> None:
    trace, path = tmp_path / "trace", tmp_path / "model.pt"
    content = {"w": torch.ones(3), "x": Hostile(trace)}
    if form == "distributed":
        path = tmp_path / ".metadata"
        path.write_bytes(pickle.dumps(Hostile(trace)))
        with pytest.raises(InputError, match=r"\.metadata: no sound .* wants \w+\.mkdir"):
            series([str(tmp_path)])
    else:
        if form.endswith("pickle"):
            protocol = 2 if form == "bare pickle" else 4
            path.write_bytes(pickle.dumps(Hostile(trace), protocol=protocol))
        else:
            torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
        with warnings.catch_warnings(action="error"):
            line = refused(path)
        if form == "new pickle":
            assert "no sound file of torch.save (Unsupported operand" in line
        else:
            assert "wants to run code, posix.mkdir, and was not opened" in line
        assert "--allow" not in line  # nobody should be led to trust that
    assert not trace.exists()


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as entry:
            for _ in range(64):
                entry.write(bytes(1 << 20))
        archive.writestr("archive/version", "3")
    tracemalloc.start()
    refused(path, "would unpack to 67,108,86")
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


OTHERS: dict[str, tuple[str, bytes, str]] = {
    "web page as torch": ("m.pt", b"<html><body>404</body>", "web page"),
    "web page as gguf": ("m.gguf", b"\n <!doctype html>", "web page"),
    "LFS pointer as torch": ("m.bin", b"version https://git-lfs.github.com/spec/v1\n", "git lfs"),
    "text": ("m.ckpt", b"hello, world", "no sound file of torch"),
    "empty": ("m.pth", b"", "is empty"),
    "empty gguf": ("m.gguf", b"", "does not begin"),
    "gguf magic only": ("m.gguf", b"GGUF", "no sound GGUF"),
    "gguf of a bad version": ("m.gguf", b"GGUF" + struct.pack("<IQQ", 99, 1, 1), "no sound GGUF"),
    "gguf with a list without end": (
        "m.gguf",
        b"GGUF"
        + struct.pack("<IQQQ", 3, 0, 1, 1)
        + b"a"
        + struct.pack("<IIQ", 9, 0, 2**40)
        + bytes(100_000),
        "lists of 1,099,511,627,776 values",
    ),
    "gguf with a list of lists": (
        "m.gguf",
        b"GGUF"
        + struct.pack("<IQQQ", 3, 0, 1, 1)
        + b"a"
        + struct.pack("<IIQ", 9, 9, 2**20)
        + struct.pack("<IQ", 0, 2**20) * 30,
        "more than the file has",
    ),
    "gguf with a huge count": (
        "m.gguf",
        b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62),
        "no sound",
    ),
    "a list": ("m.pt", b"", "no tensors"),
    "an archive of nothing": ("m.pt", b"PK\x05\x06" + bytes(18), "no sound|cannot"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_bad_files_are_one_clear_line(tmp_path: Path, case: str) -> None:
    name, content, match = OTHERS[case]
    path = tmp_path / name
    path.write_bytes(content)
    if case == "a list":
        torch.save([torch.ones(3)], path)
    refused(path, match)


def test_a_tensor_that_repeats_what_is_stored_is_told_and_not_unfolded(tmp_path: Path) -> None:
    few, bomb = torch.ones(1, 64).expand(128, 64), torch.zeros(1).expand(2_000_000_000, 1000)
    torch.save({"w": torch.ones(8, 8), "few": few, "bomb": bomb}, tmp_path / "model.pt")
    (one,) = series([str(tmp_path / "model.pt")])
    assert [tensor.name for tensor in one.tensors] == ["w", "few"]
    assert one.read("few").shape == (128, 64)
    assert one.unreadable == (("bomb", "repeats what is stored to 8,000,000,000,000 bytes"),)


def _distributed(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings(action="ignore"):
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
    return folder


def test_distributed_metadata_that_claims_too_much_is_told(tmp_path: Path) -> None:
    folder = _distributed(tmp_path / "m", {"w": torch.ones(30, 20), "v": torch.ones(8, 5)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    claims = metadata.state_dict_metadata["w"]
    claims.size = torch.Size([10**7, 10**6])
    claims.chunks[0].sizes = claims.size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (one,) = series([str(folder)])
    assert [tensor.name for tensor in one.tensors] == ["v"]
    assert one.unreadable == (("w", "fewer bytes are stored than its shape takes"),)


def test_distributed_pieces_that_lie_over_each_other_are_told(tmp_path: Path) -> None:
    folder = _distributed(tmp_path / "m", {"w": torch.ones(30, 20), "v": torch.ones(8, 5)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    chunk = metadata.state_dict_metadata["w"].chunks[0]
    chunk.sizes = torch.Size([15, 20])
    metadata.state_dict_metadata["w"].chunks.append(chunk)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (one,) = series([str(folder)])
    assert one.unreadable == (("w", "its pieces do not make up the whole tensor"),)


def test_one_bad_checkpoint_of_a_series_costs_only_itself(tmp_path: Path) -> None:
    for step, length in ((100, None), (200, 5000), (300, None)):
        (tmp_path / f"step{step}").mkdir()
        (tmp_path / f"step{step}" / "model.safetensors").write_bytes(
            safetensors(HEADER, length=length)
        )
    found = series([str(tmp_path)])
    assert [one.step for one in found] == [100, 300]
    ((name, reason),) = found[0].unreadable
    assert name == "step200" and "claims 5,000 bytes" in reason
    (tmp_path / "model.safetensors").write_bytes(safetensors(HEADER))
    (final,) = series([str(tmp_path)])
    assert [name for name, _ in final.unreadable] == ["step100", "step200", "step300"]
    assert "another checkpoint in the folder" in final.unreadable[0][1]
    (tmp_path / "run").mkdir()
    for i in range(2):
        (tmp_path / "run" / f"consolidated.0{i}.pth").write_bytes(b"")
    with pytest.raises(InputError, match="cut into 2 tensor-parallel parts"):
        series([str(tmp_path / "run")])


def test_what_is_no_checkpoint_at_all_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing.here: no such file or folder"):
        series([str(tmp_path / "nothing.here")])
    with pytest.raises(InputError, match=r"holds no checkpoint: expected \.safetensors"):
        series([str(tmp_path)])
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(safetensors(HEADER))
    with pytest.raises(InputError, match="holds no checkpoint"):
        series([str(tmp_path)])


INDEXES: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "no JSON"),
    "no map": ({"metadata": {}}, "no weight_map"),
    "leads out": ({"weight_map": {"a": "../secret.safetensors"}}, "outside of its folder"),
    "names nothing": ({"weight_map": {}}, "names no file"),
    "missing": ({"weight_map": {"a": "gone.safetensors"}}, "no such file"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_bad_index_is_one_clear_line(tmp_path: Path, case: str) -> None:
    content, match = INDEXES[case]
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(InputError, match=match):
        series([str(tmp_path)])


# Mutations: whatever is done to a sound file, it is read or refused in one line.


def _torch(old: bool) -> bytes:
    buffer = io.BytesIO()
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4).half()}
    torch.save(tensors, buffer, _use_new_zipfile_serialization=not old)
    return buffer.getvalue()


def _gguf(folder: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(folder / "m.gguf", "llama")
    writer.add_head_count(4)
    writer.add_tensor("blk.0.attn_q.weight", np.ones((4, 32), np.float32))
    writer.add_tensor("blk.0.attn_k.weight", np.ones((4, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mutate(content: bytes, edits: list[tuple[int, bytes]], cut: int) -> bytes:
    changed = bytearray(content)
    for place, new in edits:
        place %= len(changed)
        changed[place : place + len(new)] = new
    return bytes(changed[: len(changed) - cut % len(changed)])


def survive(path: Path) -> None:
    """Read everything, or be told why not in one line."""
    try:
        for one in series([str(path)]):
            for tensor in one.tensors:
                try:
                    assert one.read(tensor.name).shape == tensor.shape
                except InputError as error:
                    assert "\n" not in str(error)
            one.close()
    except InputError as error:
        assert "\n" not in str(error)


EDITS = st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=9)), max_size=4)


def _index(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(safetensors(HEADER))
    names = dict.fromkeys(HEADER, "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _shared(folder: Path) -> None:
    _distributed(folder, {"w": torch.ones(6, 4), "b": torch.ones(3)})


# What a folder holds, which of its files is mutated, and whether that file alone is opened.
SOUND: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "m.safetensors": (
        lambda f: save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4)}, f / "m.safetensors"),
        "m.safetensors", True,
    ),
    "zip.pt": (lambda f: (f / "zip.pt").write_bytes(_torch(old=False)), "zip.pt", True),
    "old.pt": (lambda f: (f / "old.pt").write_bytes(_torch(old=True)), "old.pt", True),
    "m.gguf": (_gguf, "m.gguf", True),
    "metadata": (_shared, ".metadata", False),
    "piece": (_shared, "__0_0.distcp", False),
    "index": (_index, "model.safetensors.index.json", False),
}  # fmt: skip


def fuzz(name: str, folder: Path, edits: list[tuple[int, bytes]], cut: int) -> None:
    make, file, alone = SOUND[name]
    place, sound = folder / "m", folder / "sound"
    if not sound.exists():
        place.mkdir()
        make(place)
        sound.write_bytes((place / file).read_bytes())
    (place / file).write_bytes(mutate(sound.read_bytes(), edits, cut))
    survive(place / file if alone else place)


QUICK = settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LONG = settings(QUICK, max_examples=3000)


@pytest.mark.filterwarnings("ignore")  # of numpy and torch, about what a damaged file claims
@pytest.mark.parametrize("name", SOUND)
@QUICK
@given(edits=EDITS, cut=st.one_of(st.just(0), st.integers(0, 5000)))
@example(edits=[], cut=0)
@example(edits=[(3620, b"\x01")], cut=0)  # a zip archive that says it spans several disks
def test_a_mutated_file_is_read_or_refused(
    tmp_path: Path, name: str, edits: list[tuple[int, bytes]], cut: int
) -> None:
    fuzz(name, tmp_path, edits, cut)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SOUND)
@LONG
@given(edits=EDITS, cut=st.one_of(st.just(0), st.integers(0, 5000)))
def test_thousands_of_mutated_files_are_read_or_refused(
    tmp_path: Path, name: str, edits: list[tuple[int, bytes]], cut: int
) -> None:
    fuzz(name, tmp_path, edits, cut)
