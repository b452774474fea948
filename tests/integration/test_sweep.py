"""Weights of checkpoints into a run file: numbers, series, kills, worker processes, a Dask cluster."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dynscope
from dynscope import weibull
from dynscope.analysis.by_role import by_role
from dynscope.errors import InputError
from dynscope.reading.run import Run
from dynscope.reports import compare, report
from dynscope.site import POOLED
from dynscope.sweep import output_name, weights
from dynscope.sweep.weigh import METRICS
from tests.format.kills import wait_for

WIDTH, BLOCKS = 64, 3
CONFIG = {
    "model_type": "gpt_neox",
    "num_attention_heads": 4,
    "architectures": ["GPTNeoXForCausalLM"],
}


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A GPT-NeoX with q, k, v of very different scales interleaved head by head in one matrix."""
    random = torch.Generator().manual_seed(seed)
    found = {"gpt_neox.embed_in.weight": torch.randn(100, WIDTH, generator=random)}
    for i in range(BLOCKS):
        prefix = f"gpt_neox.layers.{i}"
        qkv = torch.randn(4, 3, WIDTH // 4, WIDTH, generator=random)
        qkv *= torch.tensor([1.0, 5.0, 0.2])[None, :, None, None] * (1 + 0.1 * seed)
        found |= {
            f"{prefix}.attention.query_key_value.weight": qkv.reshape(3 * WIDTH, WIDTH),
            f"{prefix}.attention.dense.weight": torch.randn(WIDTH, WIDTH, generator=random),
            f"{prefix}.mlp.dense_h_to_4h.weight": torch.randn(4 * WIDTH, WIDTH, generator=random),
            f"{prefix}.mlp.dense_h_to_4h.bias": torch.ones(4 * WIDTH),
            f"{prefix}.mlp.dense_4h_to_h.weight": torch.randn(WIDTH, 4 * WIDTH, generator=random),
        }
    return {name: value.to(dtype) for name, value in found.items()}


def checkpoint(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors(seed, dtype), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def run_series(folder: Path, steps: tuple[int, ...] = (200, 30, 1000)) -> Path:
    for step in steps:
        checkpoint(folder / f"step{step}", seed=step)
    return folder


def at(run: Run, metric: str, name: str, row: int = -1) -> float:
    place = [parameter.name for parameter in run.parameters].index(name)
    return float(run[f"weight/{metric}"].values[row, place])


def equal(one: Run, other: Run) -> None:
    assert one.parameters == other.parameters
    assert one.weight_steps.tolist() == other.weight_steps.tolist()
    for metric in METRICS:
        np.testing.assert_array_equal(one[metric].values, other[metric].values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_number_is_that_of_the_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = checkpoint(tmp_path / "m", dtype=dtype)
    run = weights(folder, tmp_path / "m.h5")
    expected = tensors(0, dtype)
    for name, tensor in expected.items():
        wide = tensor.double().numpy()
        assert at(run, "norm", name) == pytest.approx(np.linalg.norm(wide), rel=1e-6)
        assert at(run, "mean", name) == pytest.approx(wide.mean(), abs=1e-7)
        assert at(run, "rms", name) == pytest.approx(np.sqrt((wide**2).mean()), rel=1e-6)
        assert at(run, "absmax", name) == pytest.approx(np.abs(wide).max(), rel=1e-6)
        fit = weibull.fit(wide)
        if wide.ndim == 2:
            assert at(run, "weibull_k", name) == pytest.approx(fit.k, rel=1e-6)
            assert at(run, "weibull_n", name) == fit.n
        else:
            assert np.isnan(at(run, "weibull_k", name))


def test_merged_matrices_are_divided_by_their_layout_and_pooled_by_role(tmp_path: Path) -> None:
    run = weights(checkpoint(tmp_path / "m"), tmp_path / "m.h5")
    expected = tensors()
    together: dict[str, list[np.ndarray]] = {"q": [], "k": [], "v": []}
    for i in range(BLOCKS):
        name = f"gpt_neox.layers.{i}.attention.query_key_value.weight"
        heads = expected[name].view(4, 3, WIDTH // 4, WIDTH)
        for place, role in enumerate("qkv"):
            part = heads[:, place].double().numpy()
            together[role].append(part)
            assert at(run, "norm", f"{name}[{role}]") == pytest.approx(
                np.linalg.norm(part), rel=1e-6
            )
    for role, parts in together.items():
        pool = next(p for p in run.parameters if p.part_of == POOLED and p.role == role)
        assert pool.numel == sum(part.size for part in parts)
        assert at(run, "weibull_k", pool.name) == pytest.approx(
            weibull.fit(np.concatenate([part.ravel() for part in parts])).k, rel=1e-6
        )
    rows = {one.role: one for one in by_role(run)}
    assert rows["q"].matrices == BLOCKS and {"qkv", "o", "in", "out"} <= rows.keys()
    assert run.metadata.settings["attention"].startswith("MHA, 4 heads")


def test_a_series_becomes_a_run_whose_steps_are_its_checkpoints(tmp_path: Path) -> None:
    run = weights(run_series(tmp_path / "run"), tmp_path / "run.h5")
    assert run.weight_steps.tolist() == [30, 200, 1000]
    alone = weights(tmp_path / "run" / "step200", tmp_path / "alone.h5")
    for metric in METRICS:
        np.testing.assert_array_equal(run[metric].values[1], alone[metric].values[0])
    page = report(run).html
    assert "3 checkpoints of 16 tensors" in page and "Weibull shape, median k of" in page
    assert "Beside published models" in page and "Shape k by role" in page
    assert "step200" in compare([run, alone], ["all", "step200"]).html


def test_roles_and_names_choose(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    run = weights(folder, tmp_path / "q.h5", roles=["q", "out"])
    assert {p.role for p in run.parameters} == {"q", "out"}
    run = weights(folder, tmp_path / "one.h5", match=["*.layers.1.*"])
    assert {p.depth for p in run.parameters if p.part_of != POOLED} == {1}
    one = weights(folder, tmp_path / "two.h5", match="*.layers.1.*", roles="out")
    assert {(p.role, p.depth) for p in one.parameters if p.part_of != POOLED} == {("out", 1)}
    with pytest.raises(InputError, match=r"no role 'quary'; there are: embed"):
        weights(folder, tmp_path / "no.h5", roles=["quary"])
    with pytest.raises(InputError, match="no tensor fits 'nothing'"):
        weights(folder, tmp_path / "no.h5", match=["nothing"])
    assert not list(tmp_path.glob("*no.h5*"))


def test_a_full_disk_is_told_and_what_is_done_is_kept(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    limited = f"""
        import resource
        from dynscope import sweep
        sweep.plan.TASK_BYTES = 20_000
        before = sweep.journal.Journal.add
        def add(self, weighed):
            if weighed.task == 5:
                size = self.path.stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            before(self, weighed)
        sweep.journal.Journal.add = add
        try:
            sweep.weights({str(folder)!r}, {str(tmp_path / "m.h5")!r})
        except sweep.InputError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(limited)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert re.fullmatch(r".*m\.h5\.partial: cannot be written \(.*\); make room .*\n", done.stdout)
    assert not (tmp_path / "m.h5").exists()
    assert np.isfinite(weights(folder, tmp_path / "m.h5")["weight/weibull_k"].values).any()


@pytest.mark.parametrize("heads", [-4, 0, "4", 10**30])
def test_absurd_heads_are_not_split_by(heads: object, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": heads}))
    run = weights(folder, tmp_path / "m.h5")
    assert np.isfinite(run["weight/weibull_k"].values).any()


def test_a_step_that_no_file_can_hold_is_none(tmp_path: Path) -> None:
    run = weights(checkpoint(tmp_path / "step99999999999999999999"), tmp_path / "m.h5")
    assert run.weight_steps.tolist() == [0]


def test_the_binned_protocol_is_recorded_and_not_compared_with_the_exact_one(
    tmp_path: Path,
) -> None:
    folder = checkpoint(tmp_path / "m")
    exact = weights(folder, tmp_path / "a.h5")
    binned = weights(folder, tmp_path / "b.h5", method="binned", trim="mid_90")
    assert binned.metadata.settings["weibull_method"] == "binned mid_90"
    name = "gpt_neox.layers.0.mlp.dense_4h_to_h.weight"
    expected = weibull.fit(tensors()[name].numpy(), "binned", "mid_90").k
    assert at(binned, "weibull_k", name) == pytest.approx(expected, rel=1e-6)
    assert at(exact, "weibull_k", name) != pytest.approx(expected, rel=1e-4)
    told = "Weibull fits are not compared: they were made by exact mid_80 (a) and binned mid_90 (b)"
    assert told in compare([exact, binned], ["exact", "binned"]).html
    other = weights(checkpoint(tmp_path / "n", seed=1), tmp_path / "n.h5")
    assert "Median Weibull k, b minus a: q " in compare([exact, other], ["m", "n"]).html
    scope = dynscope.attach(torch.nn.Linear(8, 8), tmp_path / "trained.h5")
    scope.close()
    trained = dynscope.load(tmp_path / "trained.h5")
    assert "are not compared" not in compare([trained, exact], ["trained", "exact"]).html
    assert "are not compared" in compare([trained, binned], ["trained", "binned"]).html


def test_a_page_of_checkpoints_counts_them(tmp_path: Path) -> None:
    run = weights(run_series(tmp_path / "run"), tmp_path / "m.h5")
    assert "Every one of 3 recorded steps is drawn." in report(run).html


def test_what_cannot_be_read_is_in_the_coverage_and_the_rest_is_measured(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    odd = {"model.ids": torch.arange(300).reshape(30, 10), "model.up.weight": torch.randn(30, 10)}
    save_file(odd, folder / "model.safetensors")
    run = weights(folder, tmp_path / "m.h5")
    told = {gap.path: gap.reason for gap in run.coverage}
    assert told["model.ids"] == weibull.QUANTISED
    assert np.isfinite(at(run, "weibull_k", "model.up.weight"))


def test_scales_of_quantized_weights_are_not_weights(tmp_path: Path) -> None:
    folder = tmp_path / "gptq"
    folder.mkdir()
    prefix = "model.layers.{}.self_attn.q_proj"
    save_file(
        {f"{prefix.format(i)}.qweight": torch.ones(64, 64, dtype=torch.int32) for i in range(3)}
        | {f"{prefix.format(i)}.scales": torch.randn(4, 64).half() for i in range(3)}
        | {f"{prefix.format(i)}.g_idx": torch.arange(64, dtype=torch.int32) for i in range(3)},
        folder / "model.safetensors",
    )
    quantized = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(quantized))
    run = weights(folder, tmp_path / "m.h5")
    assert all(one.name.endswith("qweight") for one in run.parameters if one.part_of != POOLED)
    assert by_role(run) == () and run.metadata.settings["quantized"] == "gptq"
    assert {gap.reason for gap in run.coverage} == {weibull.QUANTISED}


def test_an_output_that_exists_is_kept(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    (tmp_path / "m.h5").write_text("mine")
    with pytest.raises(InputError, match=r"m\.h5: exists already"):
        weights(folder, tmp_path / "m.h5")
    assert (tmp_path / "m.h5").read_text() == "mine"
    source = folder / "model.safetensors"
    before = source.read_bytes()
    for target in (tmp_path / "m.h5", source):
        with pytest.raises(InputError, match="not overwritten, .*; give another output"):
            weights(folder, target, overwrite=True)
    assert source.read_bytes() == before and (tmp_path / "m.h5").read_text() == "mine"
    weights(folder, tmp_path / "run.h5")
    weights(folder, tmp_path / "run.h5", overwrite=True)
    assert output_name([folder]).name == "m.weights.h5"
    assert output_name(["s3://b/run/step1", "s3://b/run/step2"]) == Path(
        "step1-to-step2.weights.h5"
    )


def test_nothing_is_left_half_written_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "m")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dynscope.sweep.RunWriter.weights", full)
    with pytest.raises(InputError, match=r"m\.h5: cannot be written \(.*No space .* is kept"):
        weights(folder, tmp_path / "m.h5")
    assert not (tmp_path / "m.h5").exists() and not list(tmp_path.glob("*.part*.h5"))
    monkeypatch.undo()
    assert weights(folder, tmp_path / "m.h5").weight_steps.tolist() == [0]


SLOWLY = """
import sys, time
from dynscope import sweep
from dynscope.sweep import weigh, plan
plan.TASK_BYTES = 1
true = sweep.weigh
def slow(task):
    print("task", task.number, flush=True)
    time.sleep(0.05)
    return true(task)
sweep.weigh = slow
sweep.weights(sys.argv[1], sys.argv[2])
"""


def killed_after(lines: int, folder: Path, target: Path) -> list[str]:
    """What a sweep that is killed after so many tasks has said."""
    with interrupted(lines, folder, target) as said:
        return said


@contextmanager
def interrupted(lines: int, folder: Path, target: Path) -> Iterator[list[str]]:
    """A sweep that has begun so many tasks, and is killed at the end."""
    command = [sys.executable, "-c", SLOWLY, str(folder), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield [process.stdout.readline() for _ in range(lines)]
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    folder, target = run_series(tmp_path / "run"), tmp_path / "run.h5"
    expected = weights(folder, tmp_path / "whole.h5")
    seen: list[str] = []
    for lines in (3, 9, 1, 14):
        seen += killed_after(lines, folder, target)
        assert not target.exists()
    command = [sys.executable, "-c", SLOWLY, str(folder), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seen += done.stdout.splitlines()
    numbers = [int(line.split()[1]) for line in seen]
    assert len(numbers) <= len(set(numbers)) + 4, "no more than the task of each kill is done twice"
    equal(Run(target), expected)
    assert not list(tmp_path.glob(".run.h5*"))


@pytest.mark.slow
def test_a_changed_checkpoint_is_measured_anew(tmp_path: Path) -> None:
    folder, target = run_series(tmp_path / "run"), tmp_path / "run.h5"
    killed_after(8, folder, target)
    save_file(tensors(seed=7), folder / "step30" / "model.safetensors")
    os.utime(folder / "step30" / "model.safetensors", (1, 1))
    equal(weights(folder, target), weights(folder, tmp_path / "other.h5"))


@pytest.mark.slow
def test_two_sweeps_into_one_file_are_kept_apart(tmp_path: Path) -> None:
    folder, target = run_series(tmp_path / "run"), tmp_path / "run.h5"
    with (
        interrupted(1, folder, target),
        pytest.raises(InputError, match="another sweep is writing"),
    ):
        weights(folder, target)


@pytest.mark.slow
def test_worker_processes_find_the_same(tmp_path: Path) -> None:
    folder = run_series(tmp_path / "run")
    equal(weights(folder, tmp_path / "one.h5"), weights(folder, tmp_path / "two.h5", workers=2))


@pytest.mark.slow
def test_worker_processes_end_with_a_killed_sweep(tmp_path: Path) -> None:
    folder = run_series(tmp_path / "run", steps=tuple(range(1, 9)))
    code = SLOWLY.replace(
        "sweep.weights(sys.argv[1], sys.argv[2])",
        """
if __name__ == "__main__":
    sweep.weights(sys.argv[1], sys.argv[2], workers=2)""",
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    with subprocess.Popen([sys.executable, script, folder, tmp_path / "o.h5"]) as process:
        wait_for(lambda: len(workers_of(process.pid)) == 2)
        workers = workers_of(process.pid)
        process.kill()
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def workers_of(process: int) -> list[int]:
    """Its children that do tasks: not the one that keeps account of semaphores."""
    found = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


@contextmanager
def dask() -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """A scheduler and two worker processes on this machine."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "10"}
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    start = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", address,
             "--no-dashboard", "--no-show"]  # fmt: skip
    processes = [subprocess.Popen(start, text=True, env=environment, **quiet)]  # type: ignore[call-overload]
    work = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--nthreads", "1",
            "--no-nanny", "--no-dashboard"]  # fmt: skip
    processes += [subprocess.Popen(work, text=True, env=environment, **quiet) for _ in range(2)]  # type: ignore[call-overload]
    try:
        yield address, processes[1:]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # distributed's own, while its workers die
def test_a_dask_worker_killed_half_way_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynscope.sweep.plan.TASK_BYTES", 1)
    folder = run_series(tmp_path / "run", steps=(1, 2, 3, 4, 5, 6))
    expected = weights(folder, tmp_path / "one.h5")
    told = []
    with dask() as (address, workers):

        def progress(done: int, total: int, where: str) -> None:
            told.append(done / total)
            if len(told) == 20:
                workers[0].kill()

        found = weights(folder, tmp_path / "many.h5", scheduler=address, progress=progress)
        assert workers[0].wait(30) == -signal.SIGKILL and workers[1].poll() is None
    assert told[-1] == pytest.approx(1) and told == sorted(told)
    equal(found, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynscope.sweep.workers.CONNECT_SECONDS", 1)
    start = time.monotonic()
    with pytest.raises(InputError, match="no Dask scheduler answers"):
        weights(checkpoint(tmp_path / "m"), tmp_path / "m.h5", scheduler="tcp://127.0.0.1:9")
    assert time.monotonic() - start < 60


def test_the_command_line_says_what_it_found(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from dynscope.cli import app

    folder = run_series(tmp_path / "run")
    done = CliRunner().invoke(app, ["weights", str(folder), "-o", str(tmp_path / "w.h5")])
    assert done.exit_code == 0, done.output
    assert "step 1,000, the last of 3" in done.output and "dynscope report" in done.output
    done = CliRunner().invoke(
        app,
        ["weights", str(folder / "step30"), "-o", str(tmp_path / "j.h5"), "--json", "-r", "q,k"],
    )
    found = json.loads(done.stdout)
    assert [one["role"] for one in found["roles"]] == ["q", "k"] and found["steps"] == [30]
    assert dynscope.load(tmp_path / "w.h5").weight_steps.tolist() == [30, 200, 1000]


def test_ck_04_a_tied_head_that_one_file_lacks_is_no_alarm(tmp_path: Path) -> None:
    both = {"model.embed.weight": torch.randn(300, 40), "lm_head.weight": torch.randn(300, 40)}
    both |= {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(80, 40) for i in range(2)}
    save_file(both, tmp_path / "untied.safetensors")
    save_file(
        {n: t for n, t in both.items() if n != "lm_head.weight"}, tmp_path / "tied.safetensors"
    )
    runs = [weights(tmp_path / f"{name}.safetensors") for name in ("untied", "tied")]
    page = compare(runs, ["untied", "tied"]).html
    assert "Not in every run" in page and "lm_head.weight" in page
    assert '<li class="bad"' not in page and '<li class="warn"' not in page


def test_what_is_fitted_together_is_no_layer_of_the_model(tmp_path: Path) -> None:
    from dynscope.reports.numbers.curves import parameter_curves

    run = weights(checkpoint(tmp_path / "m"), tmp_path / "m.h5")
    pooled = [i for i, one in enumerate(run.parameters) if one.part_of == POOLED]
    assert pooled
    assert not any("[all" in name for one in parameter_curves(run.parameters) for name in one.names)
