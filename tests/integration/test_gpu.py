"""On a GPU: the numbers of the CPU, one copy per recorded step, and what only a GPU can be asked."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import dynscope
from examples import pre_ln
from examples.language_model import Size

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
SIZE = Size(width=64, heads=2, hidden=96, blocks=4, context=32)
METRICS = ("activation/variance", "activation/absmax", "activation_gradient/rms", "gradient/norm",
           "update/norm", "massive/value")  # fmt: skip


def recorded(device: str, path: Path, **options: Any) -> dynscope.Run:
    torch.manual_seed(0)
    model = pre_ln.build(SIZE)
    tokens = torch.randint(SIZE.vocabulary, (4, SIZE.context)).to(device)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dynscope.attach(model, path, optimizer=optimizer, every=1, **options) as scope:
        for _ in range(3):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.log(loss=loss)
    return dynscope.load(path)


@pytest.mark.parametrize("masked", [False, True])
def test_a_gpu_records_what_the_cpu_does(tmp_path: Path, masked: bool) -> None:
    real = (torch.arange(SIZE.context) < 20).expand(4, -1).contiguous()
    cpu, gpu = (
        recorded(device, tmp_path / f"{device}.h5", mask=real if masked else None)
        for device in ("cpu", "cuda")
    )
    for name in METRICS:
        np.testing.assert_allclose(gpu[name], cpu[name], rtol=1e-2, err_msg=name)


def test_ni_14_a_recorded_step_is_copied_to_the_host_once(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(50))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 32, device="cuda")

    def copies(scope: dynscope.Recorder | None) -> int:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            for _ in range(10):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
        return sum(event.count for event in found.key_averages() if "DtoH" in event.key)

    plain = copies(None)
    with dynscope.attach(
        model,
        tmp_path / "run.h5",
        optimizer=optimizer,
        every=1,
        sites="leaves",
        weights_every=lambda step: False,
    ) as scope:
        assert copies(scope) - plain <= 10


def test_ni_16_deterministic_algorithms_may_be_asked_for(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        run = recorded("cuda", tmp_path / "run.h5")
    finally:
        torch.use_deterministic_algorithms(False)
    assert not [event for event in run.events if event.kind == "failure"]


def test_co_07_a_step_that_is_captured_is_left_alone_and_told(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
    x = torch.randn(4, 8, device="cuda")
    with dynscope.attach(model, tmp_path / "run.h5", every=1, sites="leaves") as scope:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x).sum().backward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x).sum().backward()
        graph.replay()
        scope.step()
    run = dynscope.load(tmp_path / "run.h5")
    assert any("CUDA graph" in gap.reason for gap in run.coverage)


def test_gr_01_a_scaler_on_the_gpu_is_found_and_its_skips_leave_no_trace(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with dynscope.attach(
        model, tmp_path / "run.h5", optimizer=optimizer, scaler=scaler, every=1, sites="leaves"
    ) as scope:
        for i in range(6):
            optimizer.zero_grad()
            x = torch.full((4, 8), float("inf") if i == 3 else 1.0, device="cuda")
            with torch.autocast("cuda", torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scope.steps == 5
    run = dynscope.load(tmp_path / "run.h5")
    assert (run["gradient/nonfinite_count"] == 0).all()
