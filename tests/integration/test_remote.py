"""Checkpoints behind URLs: a real S3 server and a real web server on this machine."""

import gc
import http.server
import json
import logging
import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import gguf
import numpy as np
import pytest
import s3fs
import torch
from fsspec.implementations.http import HTTPFileSystem
from moto.server import ThreadedMotoServer
from safetensors.numpy import save_file

from dynscope.checkpoints import series
from dynscope.errors import InputError
from dynscope.sweep import weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _connections_end_here() -> Iterator[None]:
    """What fsspec leaves open is told when it is collected, which may be in another file's test."""
    yield
    HTTPFileSystem.clear_instance_cache()
    s3fs.S3FileSystem.clear_instance_cache()
    gc.collect()


class Counter:
    """Passes a connection on to a server and counts the bytes that come back."""

    def __init__(self, server: int) -> None:
        self.received = 0
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                for one, other, counted in ((client, server, False), (server, client, True)):
                    threading.Thread(
                        target=self._pass, args=(one, other, counted), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                self.received += len(chunk) * counted
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """An S3 server with an empty bucket ``bucket``, which is reached through a counter."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0)
    server.start()
    port = server.get_host_and_port()[1]
    with urlopen(f"http://127.0.0.1:{port}/moto-api/reset", data=b""):
        counter = Counter(port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{counter.port}")
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "hidden-secret"),
                        ("DEFAULT_REGION", "us-east-1")):  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    yield counter
    s3fs.S3FileSystem.clear_instance_cache()
    counter.close()
    server.stop()


def model(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """A Hugging Face folder of two shards and a megabyte and a half."""
    random = np.random.default_rng(seed)
    names = [
        f"model.layers.{i}.mlp.{part}.weight" for i in range(3) for part in ("up_proj", "down_proj")
    ]
    tensors = {n: random.standard_normal((256, 256)).astype(np.float32) for n in names}
    folder.mkdir(parents=True)
    where: dict[str, str] = {}
    for i in range(2):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        own = dict(list(tensors.items())[3 * i : 3 * i + 3])
        save_file(own, folder / file)
        where |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tensors


def put(folder: Path, key: str) -> None:
    s3fs.S3FileSystem().put(str(folder), key, recursive=True)


def test_only_the_tensors_asked_for_travel(tmp_path: Path, bucket: Counter) -> None:
    tensors = model(tmp_path / "m")
    put(tmp_path / "m", "bucket/m")
    total = sum(file.stat().st_size for file in (tmp_path / "m").iterdir())
    s3fs.S3FileSystem.clear_instance_cache()
    before = bucket.received
    (one,) = series(["s3://bucket/m"])
    assert one.config == {"model_type": "llama"} and len(one.tensors) == 6
    assert bucket.received - before < 40_000
    name = "model.layers.1.mlp.down_proj.weight"
    before = bucket.received
    np.testing.assert_array_equal(one.read(name), tensors[name])
    travelled = bucket.received - before
    assert tensors[name].nbytes <= travelled < tensors[name].nbytes + 5_000 < total


class Code:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("ran",))


def test_of_a_torch_file_only_the_tensors_asked_for_travel(tmp_path: Path, bucket: Counter) -> None:
    random = torch.Generator().manual_seed(0)
    large = torch.randn(400, 600, generator=random)
    state = {
        "large": large, "tied": large, "rows": large[100:110], "turned": large.t()[5:9],
        "bf16": torch.randn(300, 50, generator=random).bfloat16(), "none": torch.zeros(0, 3),
        "half": torch.nn.Parameter(torch.randn(64, 64, generator=random).half()),
    }  # fmt: skip
    torch.save({"model": state, "optimizer": {"exp_avg": large * 2}, "step": 12}, tmp_path / "a.pt")
    torch.save({"sparse": torch.eye(300).to_sparse(), "w": large}, tmp_path / "sparse.pt")
    torch.save({"w": large, "x": Code()}, tmp_path / "code.pt")
    torch.save({"w": large}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("a", "sparse", "code", "old"):
        put(tmp_path / f"{name}.pt", f"bucket/{name}.pt")
    before = bucket.received
    (one,) = series(["s3://bucket/a.pt"])
    assert one.step == 12 and bucket.received - before < 300_000 < large.nbytes
    (same,) = series([str(tmp_path / "a.pt")])
    assert [vars(t) for t in one.tensors] == [vars(t) for t in same.tensors]
    for tensor in same.tensors:
        before = bucket.received
        np.testing.assert_array_equal(one.read(tensor.name), same.read(tensor.name))
        assert bucket.received - before < large.nbytes + 5_000
    before = bucket.received
    assert one.read("rows").shape == (10, 600)
    assert bucket.received - before < 10 * 600 * 4 + 5_000
    again = pickle.loads(pickle.dumps(one))
    np.testing.assert_array_equal(again.read("bf16"), same.read("bf16"))
    for name in ("sparse", "old"):
        (whole,) = series([f"s3://bucket/{name}.pt"])
        np.testing.assert_array_equal(whole.read("w"), large.numpy())
    with pytest.raises(InputError, match="wants to run code, print"):
        series(["s3://bucket/code.pt"])


def test_of_a_gguf_file_only_the_tensors_asked_for_travel(tmp_path: Path, bucket: Counter) -> None:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list([f"token {i}" for i in range(5000)])
    writer.add_array("some.numbers", [1.5, 2.5])
    writer.add_bool("some.flag", True)
    plain = random.standard_normal((300, 256)).astype(np.float32)
    packed = gguf.quants.quantize(plain, gguf.GGMLQuantizationType.Q8_0)
    for i in range(4):
        writer.add_tensor(f"blk.{i}.attn_q.weight", plain + i)
        writer.add_tensor(
            f"blk.{i}.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    put(tmp_path / "m.gguf", "bucket/m.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:30_000])
    put(tmp_path / "cut.gguf", "bucket/cut.gguf")
    before = bucket.received
    (one,) = series(["s3://bucket/m.gguf"])
    assert bucket.received - before < 400_000 < (tmp_path / "m.gguf").stat().st_size
    (same,) = series([str(tmp_path / "m.gguf")])
    assert one.tensors == same.tensors and one.config == same.config
    assert one.quantized == same.quantized == "Q8_0"
    expected = {tensor.name: same.read(tensor.name) for tensor in same.tensors}
    one.read("blk.0.attn_q.weight")  # opens the header again, which is here already
    for tensor in one.tensors:
        before = bucket.received
        np.testing.assert_array_equal(one.read(tensor.name), expected[tensor.name])
        assert bucket.received - before < tensor.nbytes + 5_000
    with pytest.raises(InputError, match="no sound GGUF file"):
        series(["s3://bucket/cut.gguf"])


def test_a_series_in_a_bucket_is_ordered(tmp_path: Path, bucket: Counter) -> None:
    expected = {}
    for step in (200, 30, 1000):
        expected[step] = model(tmp_path / f"step{step}", seed=step)
        put(tmp_path / f"step{step}", f"bucket/run/step{step}")
    found = series(["s3://bucket/run"])
    assert [one.step for one in found] == [30, 200, 1000]
    for one in found:
        assert one.step is not None
        for name, value in expected[one.step].items():
            np.testing.assert_array_equal(one.read(name), value)


def test_what_goes_wrong_is_one_line_without_credentials(
    tmp_path: Path, bucket: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "model.safetensors").write_text("<html>Sign in</html>")
    put(tmp_path / "page", "bucket/page")
    told = {
        "s3://bucket/gone/model.safetensors": "no such file",
        "s3://no-such-bucket/m": "no such file|cannot be read",
        "s3://bucket/page": "web page",
    }
    for url, match in told.items():
        with pytest.raises(InputError, match=match) as error:
            series([url])
        assert "\n" not in str(error.value) and "hidden-secret" not in str(error.value)
    bucket.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(InputError, match="cannot be read|no such file") as error:
        series(["s3://bucket/m"])
    assert "\n" not in str(error.value)


@contextmanager
def served(folder: Path, kind: Any = None) -> Iterator[str]:
    """A folder behind http, by a server that knows ranges."""
    handler = partial(kind or Ranges, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Whole(http.server.SimpleHTTPRequestHandler):
    """Python's own server as it is: it knows no ranges."""

    sent = 0

    def send_head(self) -> Any:
        Whole.sent += 1
        return super().send_head()

    def log_message(self, *arguments: object) -> None:
        pass


class Refusing(Whole):
    """A server that wants a password."""

    def send_head(self) -> None:
        self.send_error(401)


def test_a_server_that_refuses_or_is_not_there_is_no_empty_folder(tmp_path: Path) -> None:
    with served(tmp_path, Refusing) as url:
        for path in (url, f"{url}/model.safetensors"):
            with pytest.raises(InputError, match=r"cannot be read \(401"):
                series([path])
    for path in (url, f"{url}/model.safetensors"):
        with pytest.raises(InputError, match="cannot be read .*connect"):
            series([path])
    with served(tmp_path) as url:
        with pytest.raises(InputError, match="holds no checkpoint"):
            series([f"{url}/m"])
        with pytest.raises(InputError, match="no such file"):
            series([f"{url}/m.safetensors"])
    with pytest.raises(InputError, match=r"http://\[::1: is no URL"):
        weights("http://[::1")


def test_a_server_without_ranges_is_asked_for_the_file_once(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {f"layers.{i}.up.weight": random.standard_normal((64, 64)) for i in range(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save({"w": torch.ones(40, 40)}, tmp_path / "model.pt")
    with served(tmp_path, Whole) as url:
        (folder,) = series([f"{url}/"])  # answered with a page that lists it
        assert len(folder.tensors) == 5
        (one,) = series([f"{url}/model.safetensors"])
        before = Whole.sent
        for name, value in tensors.items():
            np.testing.assert_array_equal(one.read(name), value)
        assert Whole.sent == before
        (other,) = series([f"{url}/model.pt"])
        assert other.read("w").shape == (40, 40)


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Python's own server, with ranges and without lists of folders."""

    sent = 0

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
            self.send_response(206)
            self.send_header(
                "Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            )
        else:
            part = content
            self.send_response(200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(part)
        Ranges.sent += len(part)

    def list_directory(self, path: object) -> None:
        self.send_error(404)

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_web_server_that_lists_nothing_is_enough(tmp_path: Path) -> None:
    tensors = model(tmp_path / "m")
    with served(tmp_path) as url:
        Ranges.sent = 0
        (one,) = series([f"{url}/m"])
        assert len(one.tensors) == 6 and Ranges.sent < 20_000
        for name, value in tensors.items():
            np.testing.assert_array_equal(one.read(name), value)
        (file,) = series([f"{url}/m/model-00001-of-00002.safetensors"])
        assert len(file.tensors) == 6
        with pytest.raises(InputError, match="no such file|holds no checkpoint"):
            series([f"{url}/nothing"])


def test_memory_file_systems_and_file_urls_work_alike(tmp_path: Path) -> None:
    tensors = model(tmp_path / "step7")
    (one,) = series([f"file://{tmp_path}/step7"])
    assert one.step == 7 and {t.name for t in one.tensors} == set(tensors)


def test_credentials_in_a_url_are_not_shown(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        secret = url.replace("http://", "http://user:pass-word@") + "/m.safetensors?token=abc"
        with pytest.raises(InputError) as error:
            series([secret])
    assert "pass-word" not in str(error.value) and "token" not in str(error.value)
