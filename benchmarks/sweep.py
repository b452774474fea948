"""A large series of checkpoints: python -m benchmarks.sweep [--gigabytes 20] [--workers 2] [--folder DIR]

Makes four checkpoints in 40 shards of bfloat16, measures them with `dynscope weights`, reads the same files
once for comparison, and takes the largest memory of all processes. Then the same sweep is killed
half-way and started again, and must find the same numbers.
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import typer
from safetensors.numpy import save_file

import dynscope

CHECKPOINTS, SHARDS, BLOCKS = 4, 10, 5
PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def make(folder: Path, gigabytes: float) -> int:
    """A series of sharded checkpoints; its size in bytes."""
    per_shard = gigabytes * 1e9 / (CHECKPOINTS * SHARDS)
    rows = int(per_shard / (2 * len(PARTS) * 4096))
    random = np.random.default_rng(0)
    pool = (0.02 * random.standard_normal(rows * 4096 + 10**6)).astype(ml_dtypes.bfloat16)
    for step in range(1, CHECKPOINTS + 1):
        place = folder / f"step{1000 * step}"
        place.mkdir(parents=True)
        where: dict[str, str] = {}
        for shard in range(SHARDS):
            file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
            tensors = {}
            for part in PARTS:
                start = int(random.integers(10**6))
                values = pool[start : start + rows * 4096].reshape(rows, 4096)
                tensors[f"model.layers.{shard}.{part}.weight"] = values
            save_file(tensors, place / file)
            where |= dict.fromkeys(tensors, file)
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def sweep(folder: Path, output: Path, workers: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "dynscope", "weights", str(folder), "-o", str(output),
               "--workers", str(workers)]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def memory(root: int) -> int:
    """Bytes that a process and its children hold of their own; shared and file pages do not count."""
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        try:
            for thread in Path(f"/proc/{process}/task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += 1024 * sum(int(line.split()[1]) for line in text.splitlines() if "Private" in line)
    return total


def watch(process: "subprocess.Popen[bytes]") -> tuple[float, int]:
    """Seconds until it ends, and the most memory on the way."""
    start, most = time.monotonic(), 0
    while process.poll() is None:
        most = max(most, memory(process.pid))
        time.sleep(0.05)
    if process.returncode:
        raise typer.Exit(process.returncode)
    return time.monotonic() - start, most


def read(folder: Path) -> float:
    """Seconds to read every file once."""
    start = time.monotonic()
    for file in sorted(folder.rglob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            room = bytearray(1 << 24)
            while stream.readinto(room):
                pass
    return time.monotonic() - start


def numbers(path: Path) -> dict[str, Any]:
    run = dynscope.load(path)
    return {metric.name: run[metric.name].values for metric in run.metrics}


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the series.")] = 20.0,
    workers: Annotated[int, typer.Option(help="Processes.")] = 2,
    folder: Annotated[
        Path | None, typer.Option(help="Where; a temporary folder by default.")
    ] = None,
) -> None:
    """Make a series, measure it, kill and continue it, and print a table."""
    place = Path(tempfile.mkdtemp(prefix="sweep-", dir=folder))
    try:
        size = make(place / "run", gigabytes)
        largest = size / (CHECKPOINTS * SHARDS * len(PARTS))
        print(
            f"{size / 1e9:.1f} GB in {CHECKPOINTS * SHARDS} shards, tensors of {largest / 1e6:.0f} MB"
        )
        reading = read(place / "run")
        seconds, most = watch(sweep(place / "run", place / "whole.h5", workers))
        again = read(place / "run")
        print("| | seconds | MB/s | memory, MB |\n| --- | --- | --- | --- |")
        print(f"| reading the files once | {reading:.1f}, {again:.1f} | "
              f"{size / 1e6 / reading:.0f}, {size / 1e6 / again:.0f} | |")  # fmt: skip
        print(f"| dynscope weights, {workers} workers | {seconds:.1f} | {size / 1e6 / seconds:.0f} | "
              f"{most / 1e6:.0f} |")  # fmt: skip
        process = sweep(place / "run", place / "killed.h5", workers)
        time.sleep(seconds / 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        rest, _ = watch(sweep(place / "run", place / "killed.h5", workers))
        print(f"| the same, killed after {seconds / 2:.1f} s and started again | {rest:.1f} | | |")
        one, other = numbers(place / "whole.h5"), numbers(place / "killed.h5")
        same = all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)
        print(f"After the kill the numbers are {'the same' if same else 'DIFFERENT'}.")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    typer.run(main)
