"""What checkpoints hold, read back: every format, every dtype, folders, shards and series."""

import json
import pickle
import shutil
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dynscope.checkpoints import Checkpoint, series
from dynscope.checkpoints.gguf_file import header_length
from dynscope.checkpoints.series import step_of
from dynscope.errors import InputError
from examples import packaged

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layers.0.up.weight": (12, 8), "layers.0.up.bias": (12,), "layers.1.up.weight": (7, 3),
              "scale": (), "nothing": (0, 4)}  # fmt: skip
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def same(found: np.ndarray[Any, Any], expected: Tensor) -> bool:
    wide = expected.double().numpy() if expected.is_floating_point() else expected.numpy()
    return found.shape == wide.shape and np.array_equal(found.astype(wide.dtype), wide)


def check(one: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    assert {tensor.name for tensor in one.tensors} == set(expected)
    for tensor in one.tensors:
        value = expected[tensor.name]
        assert tensor.shape == tuple(value.shape)
        assert tensor.nbytes == value.numel() * value.itemsize
        assert str(value.dtype) == f"torch.{tensor.dtype}"
        assert same(one.read(tensor.name), value), tensor.name
    again = pickle.loads(pickle.dumps(one))
    weight, bias = list(expected)[:2]
    assert again == one and same(again.read(bias), expected[bias])
    one.close()
    assert same(one.read(weight), expected[weight])


@pytest.mark.parametrize(
    ("dtype", "suffix"),
    [(d, s) for s in ("safetensors", "pt", "old.pt") for d in FLOATS]
    + [(d, s) for s in ("safetensors", "pt") for d in EIGHT_BITS],
    ids=str,
)
def test_ck_02_every_float_is_read_as_it_is(
    tmp_path: Path, dtype: torch.dtype, suffix: str
) -> None:
    path, tensors = tmp_path / f"model.{suffix}", weights(dtype)
    if suffix == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=suffix == "pt")
    (one,) = series([str(path)])
    check(one, tensors)
    assert one.format == ("safetensors" if suffix == "safetensors" else "torch")
    array = one.read("layers.0.up.weight")
    names = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}
    assert dtype not in names or array.dtype == names[dtype]


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.int32], ids=str
)
def test_integers_are_read_too(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.arange(6).reshape(2, 3).to(dtype)}
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "b.pt")
    for one in (*series([str(tmp_path / "a.safetensors")]), *series([str(tmp_path / "b.pt")])):
        assert same(one.read("a"), tensors["a"])


def sharded(folder: Path, parts: int = 3, suffix: str = "safetensors") -> dict[str, Tensor]:
    """A Hugging Face folder in ``parts`` files with an index and a configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = [f"{stem}-{i + 1:05d}-of-{parts:05d}.{suffix}" for i in range(parts)]
    where = {name: names[i % parts] for i, name in enumerate(tensors)}
    for file in names:
        own = {name: tensors[name] for name in tensors if where[name] == file}
        save_file(own, folder / file) if suffix == "safetensors" else torch.save(own, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_attention_heads": 4})
    )
    return tensors


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_hugging_face_folder_in_shards(tmp_path: Path, suffix: str) -> None:
    tensors = sharded(tmp_path / "m", suffix=suffix)
    (one,) = series([str(tmp_path / "m")])
    check(one, tensors)
    assert one.config == {"model_type": "llama", "num_attention_heads": 4} and one.step is None
    # One of its shards stands for all of them.
    first = next((tmp_path / "m").glob("*-00001-of-*"))
    (again,) = series([str(first)])
    assert again.tensors != () and {t.name for t in again.tensors} == set(tensors)


def test_a_missing_and_a_damaged_shard_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with (tmp_path / "model-00003-of-00003.safetensors").open("r+b") as file:
        file.truncate(100)
    (one,) = series([str(tmp_path)])
    told = dict(one.unreadable)
    assert {t.name for t in one.tensors} == {"layers.0.up.weight", "scale"}
    assert set(told) == set(tensors) - {t.name for t in one.tensors}
    assert "00002" in told["layers.0.up.bias"] and "no such file" in told["layers.0.up.bias"]
    assert "00003" in told["layers.1.up.weight"]


def test_a_folder_with_one_file_and_what_lies_around_it(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    torch.save({}, tmp_path / "training_args.bin")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 750}))
    (one,) = series([str(tmp_path)])
    check(one, weights())
    assert one.step == 750


WRAPPED: dict[str, Any] = {
    "plain": lambda tensors: tensors,
    "state_dict": lambda tensors: {"state_dict": tensors, "epoch": 3},
    "lightning": lambda tensors: {
        "state_dict": {f"model.{n}": t for n, t in tensors.items()},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}],
        "global_step": 12,
    },
    "deepspeed": lambda tensors: {"module": tensors, "optimizer": {"exp_avg": torch.ones(3)}},
    "trainer": lambda tensors: {"optimizer": {"a": torch.ones(5)}, "model": tensors, "step": 12},
    "nested": lambda tensors: {"checkpoint": {"model": tensors}, "rng": {"cpu": torch.ones(4)}},
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_ck_05_weights_are_found_in_whatever_they_are_wrapped(
    tmp_path: Path, wrapping: str
) -> None:
    torch.save(WRAPPED[wrapping](weights()), tmp_path / "last.ckpt")
    (one,) = series([str(tmp_path / "last.ckpt")])
    check(one, weights())
    assert one.step == (12 if wrapping in ("lightning", "trainer") else None)


def test_ck_04_tied_tensors_are_read_once(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    torch.save(model.state_dict(), tmp_path / "m.pt")
    (one,) = series([str(tmp_path / "m.pt")])
    assert [tensor.name for tensor in one.tensors] == ["embed.weight"]


def test_ck_01_a_class_in_a_pickle_is_refused_by_name_and_may_be_allowed(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"model": weights(), "args": Namespace(lr=1e-3)}, path)
    with pytest.raises(
        InputError, match=r"m\.pt: wants to run code, argparse\.Namespace, .*--allow"
    ) as error:
        series([str(path)])
    assert "\n" not in str(error.value)
    (one,) = series([str(path)], allow=["argparse.Namespace"])
    check(one, weights())
    with pytest.raises(InputError, match="no class 'nothing.Here'"):
        series([str(path)], allow=["nothing.Here"])


def test_gguf_is_read_dequantized_and_says_so() -> None:
    gguf = pytest.importorskip("gguf")
    path = next(packaged.folder(packaged.SMOLLM2).glob("*.gguf"))
    (one,) = series([str(path)])
    assert one.format == "gguf" and one.quantized == "Q4_1, Q8_0"
    assert one.config is not None and one.config["llama.attention.head_count_kv"] == 3
    by_name = {tensor.name: tensor for tensor in one.tensors}
    assert by_name["blk.0.attn_k.weight"].shape == (192, 576)
    found = one.read("blk.0.attn_k.weight")
    reader = gguf.GGUFReader(path)
    twin = next(t for t in reader.tensors if t.name == "blk.0.attn_k.weight")
    np.testing.assert_array_equal(found, gguf.quants.dequantize(twin.data, twin.tensor_type))
    assert found.dtype == np.float32 and by_name["blk.0.attn_norm.weight"].dtype == "float32"


def test_a_distributed_checkpoint_is_read_without_a_process_group(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 5)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 30).bfloat16()).sum().backward()
    optimizer.step()
    with warnings.catch_warnings(action="ignore"):  # torch warns that there is no process group
        dcp.save(  # type: ignore[attr-defined]
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "n": torch.tensor(7),
            },
            checkpoint_id=tmp_path / "step7",
        )
    (one,) = series([str(tmp_path / "step7")])
    assert one.format == "torch distributed" and one.step == 7
    state = model.state_dict()
    assert {tensor.name for tensor in one.tensors} == set(state)
    for name, value in state.items():
        found = one.read(name)
        assert found.dtype == ml_dtypes.bfloat16 and same(found, value)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step1000", 1000), ("step_10", 10), ("checkpoint-500", 500), ("iter_0001000", 1000),
        ("global_step42", 42), ("epoch=3-step=100.ckpt", 100), ("model-step=7.safetensors", 7),
        ("0002000", 2000), ("500", 500), ("model_12345.pt", 12345), ("ckpt-77.pt", 77),
        ("llama-3", None), ("phi-2", None), ("model-00001-of-00003.safetensors", None),
        ("pythia-70m", None), ("model.safetensors", None), ("step7b", 7), ("footstep", None),
    ],
)  # fmt: skip
def test_the_step_is_read_from_the_name(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_a_series_is_ordered_by_step_wherever_it_comes_from(tmp_path: Path) -> None:
    for step in (1000, 200, 30):
        sharded(tmp_path / "run" / f"step{step}")
    save_file(weights(), tmp_path / "other-step=500.safetensors")
    found = series([str(tmp_path / "other-step=500.safetensors"), str(tmp_path / "run")])
    assert [one.step for one in found] == [30, 200, 500, 1000]
    shutil.copytree(tmp_path / "run" / "step30", tmp_path / "checkpoint-30")
    with pytest.raises(InputError, match=r"run/step30 and .*checkpoint-30: are both of step 30"):
        series([str(tmp_path / "run"), str(tmp_path / "checkpoint-30")])
    # The same path twice is one checkpoint; one without a step leaves the given order.
    save_file(weights(), tmp_path / "final.safetensors")
    names = [str(tmp_path / "final.safetensors"), str(tmp_path / "run" / "step30")]
    assert [one.step for one in series([*names, names[0]])] == [None, 30]


def test_files_of_one_folder_may_be_the_series(tmp_path: Path) -> None:
    for step in (100, 20):
        torch.save(weights(seed=step), tmp_path / f"model_step_{step}.pt")
    found = series([str(tmp_path)])
    assert [one.step for one in found] == [20, 100]
    check(found[1], weights(seed=100))


def save_sharded(rank: int, folder: str, port: int) -> None:
    """One of two processes that save rows and columns of the same matrices together."""
    import os

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    state = {
        "rows": distribute_tensor(torch.randn(31, 8), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(6, 20), mesh, [Shard(1)]),
        "both": distribute_tensor(torch.randn(5, 5), mesh, [Replicate()]),
    }
    dcp.save({"model": state}, checkpoint_id=folder)  # type: ignore[attr-defined]
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, in the processes that save
def test_what_two_processes_saved_is_put_together(tmp_path: Path) -> None:
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(save_sharded, (str(tmp_path / "step3"), port), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    assert len(list((tmp_path / "step3").glob("*.distcp"))) == 2
    (one,) = series([str(tmp_path / "step3")])
    torch.manual_seed(0)
    expected = {
        "rows": torch.randn(31, 8),
        "columns": torch.randn(6, 20),
        "both": torch.randn(5, 5),
    }
    assert {tensor.name for tensor in one.tensors} == set(expected)
    for name, value in expected.items():
        assert same(one.read(name), value), name
    next((tmp_path / "step3").glob("*.distcp")).unlink()
    with pytest.raises(InputError, match="distcp: no such file"):
        for name in expected:
            one.read(name)


def test_the_header_of_a_gguf_file_ends_where_gguf_says() -> None:
    (path,) = packaged.folder(packaged.SMOLLM2).rglob("*.gguf")
    with path.open("rb") as file:
        length = header_length(file, path.stat().st_size)
    data = min(int(one.data_offset) for one in gguf.GGUFReader(path).tensors)
    assert data - 32 < length <= data


@pytest.mark.parametrize("key", ["model", "state_dict", "net"])
def test_the_model_is_found_beside_tensors_of_its_trainer(tmp_path: Path, key: str) -> None:
    beside = {"best_val_loss": torch.tensor(1.5), "loss": torch.ones(1), "iter_num": 40,
              "rng_state": torch.get_rng_state(), "ema_decay": torch.ones(3, 3)}  # fmt: skip
    torch.save({**beside, key: weights(), "optimizer": {"state": {}}}, tmp_path / "ckpt.pt")
    (one,) = series([str(tmp_path / "ckpt.pt")])
    check(one, weights())
    assert one.step == 40
    torch.save({"best": torch.tensor(1.5), "generator": weights()}, tmp_path / "gan.pt")
    check(series([str(tmp_path / "gan.pt")])[0], weights())


def test_several_models_of_one_file_are_kept_apart(tmp_path: Path) -> None:
    one, two = weights(), weights(seed=1)
    moments = {"state": {0: {"exp_avg": torch.ones(3, 3)}}, "param_groups": [{"lr": 0.1}]}
    saved = {"generator": one, "d_adam": moments, "discriminator": two, "epoch": 3}
    torch.save(saved, tmp_path / "gan.pt")
    both = {"generator": one, "discriminator": two}
    check(
        series([str(tmp_path / "gan.pt")])[0],
        {f"{model}.{name}": tensor for model in both for name, tensor in both[model].items()},
    )


def test_a_step_may_be_written_with_a_unit() -> None:
    named = {"step1k": 1000, "step_1e3": 1000, "step20K-final": 20_000, "ckpt-2m.pt": 2_000_000}
    named |= {"step=1000-epoch=3.ckpt": 1000, "step_20_epoch_3.pt": 20, "epoch=3.ckpt": 3}
    named |= {"step1000ema": 1000, "step7kinds": 7, "epoch=3-step=1200.ckpt": 1200}
    assert {name: step_of(name) for name in named} == named


def test_the_step_of_a_file_may_be_that_of_its_folder(tmp_path: Path) -> None:
    paths = []
    for step in (100, 1000, 200):
        (tmp_path / f"step{step}").mkdir()
        paths.append(str(tmp_path / f"step{step}" / "model.safetensors"))
        save_file(weights(seed=step), paths[-1])
    found = series(paths)
    assert [one.step for one in found] == [100, 200, 1000]
    check(found[1], weights(seed=200))


def test_a_shard_that_is_missing_is_told_without_an_index_too(tmp_path: Path) -> None:
    for number in (1, 3):
        own = {f"layers.{number}.up.weight": torch.ones(4, 4)}
        save_file(own, tmp_path / f"model-0000{number}-of-00003.safetensors")
    (one,) = series([str(tmp_path)])
    assert len(one.tensors) == 2
    ((name, reason),) = one.unreadable
    assert name == "model-00002-of-00003.safetensors" and "no such file" in reason
