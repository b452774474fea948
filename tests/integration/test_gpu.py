"""A run recorded on a GPU holds the numbers of the same run on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

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


def recorded(device: str, path: Path) -> dynscope.Run:
    torch.manual_seed(0)
    model = pre_ln.build(SIZE)
    tokens = torch.randint(SIZE.vocabulary, (4, SIZE.context)).to(device)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dynscope.attach(model, path, optimizer=optimizer, every=1) as scope:
        for _ in range(3):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.log(loss=loss)
    return dynscope.load(path)


def test_a_gpu_records_what_the_cpu_does(tmp_path: Path) -> None:
    cpu, gpu = (recorded(device, tmp_path / f"{device}.h5") for device in ("cpu", "cuda"))
    for name in METRICS:
        np.testing.assert_allclose(gpu[name], cpu[name], rtol=1e-2, err_msg=name)
