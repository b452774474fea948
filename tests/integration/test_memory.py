"""A training that is recorded for long does not fill the memory."""

import time
import tracemalloc
from pathlib import Path

import torch
from torch import nn

import dynscope
from tests.live import squares


def test_300_recorded_steps_do_not_let_memory_grow(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dynscope.attach(
        model, tmp_path / "run.h5", optimizer=optimizer, every=1, sites="leaves", summary=False
    ) as scope:

        def train(steps: int) -> int:
            for _ in range(steps):
                optimizer.zero_grad()
                squares(model(x)).backward()
                optimizer.step()
                scope.log(loss=1.0)
                with torch.no_grad():
                    model(x)
            time.sleep(0.7)  # the writer takes what waits for it
            return tracemalloc.get_traced_memory()[0]

        train(20)
        tracemalloc.start(1)
        try:
            before = train(20)
            after = train(280)
        finally:
            tracemalloc.stop()
    assert after - before < 280 * 100  # not two objects per step
