"""Sharded and distributed training; one test per reported case."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynscope
from tests.live import failures, parameter, reasons, site, squares

OPTIONS: dict[str, Any] = {"every": 1, "sites": "leaves", "summary": False}


@pytest.mark.usefixtures("quick_writer")
def test_di_05_09_parameters_without_elements_are_missing_with_a_notice(tmp_path: Path) -> None:
    """What ZeRO and uneven sharding leave on a rank: nothing, and no gradient either."""

    class Sharded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.elsewhere = nn.Parameter(torch.empty(0))

        def forward(self, x: Tensor) -> Any:
            return self.layer(x) + (x @ self.empty.T).sum()

    model = Sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, metrics="full", **OPTIONS):
        for _ in range(2):
            squares(model(torch.randn(3, 4))).backward()
            optimizer.step()
    run = dynscope.load(path)
    assert not failures(run)
    for name in ("empty", "elsewhere"):
        assert np.isnan(parameter(run, "gradient/norm", name))
        assert np.isnan(parameter(run, "update/norm", name))
        assert "no gradient" in reasons(run, name)
    assert parameter(run, "gradient/norm", "layer.weight") > 0


_RANK = """
    import os, sys, torch, dynscope
    from torch.nn.parallel import DistributedDataParallel
    import torch.distributed as dist
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scope = dynscope.attach(
        ddp, sys.argv[1], optimizer=optimizer, every=1, sites="leaves", summary=False
    )
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.full((2, 4), 1.0 + dist.get_rank() + step)
            if micro == 0:
                with ddp.no_sync():
                    ddp(x).square().mean().backward()
            else:
                ddp(x).square().mean().backward()
        optimizer.step()
    print("norm", float(model.weight.grad.double().norm()))
    scope.close()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_di_01_02_ranks_write_files_of_their_own_with_reduced_gradients(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = tmp_path / "run.h5"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_RANK), str(path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)}
            | {"WORLD_SIZE": "2", "HDF5_USE_FILE_LOCKING": "FALSE", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    norms = [float(out.split()[1]) for out, _ in outputs]
    assert norms[0] == norms[1]
    for name, norm in zip(("run.h5", "run.rank1.h5"), norms, strict=True):
        run = dynscope.load(tmp_path / name)
        assert run.metadata.world_size == 2 and run.steps.tolist() == [1, 2, 3]
        assert [p.name for p in run.parameters] == ["weight", "bias"]
        assert np.isclose(parameter(run, "gradient/norm", "weight", 2), norm, rtol=1e-5)
        assert site(run, "activation/n_calls", "", 2) == 2
        assert not failures(run)
