"""A tiny real model, trained with dynscope attached, becomes a page with its own numbers on it."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

import dynscope
from dynscope.reports import report


def train(path: Path, steps: int = 6) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dynscope.attach(model, str(path), optimizer=optimizer, every=1) as scope:
        for _ in range(steps):
            loss = model(torch.randn(4, 8, 16)).square().mean()
            loss.backward()
            scope.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


def test_a_recorded_training_is_told_and_drawn(tmp_path: Path) -> None:
    train(tmp_path / "run.h5")
    run = dynscope.load(tmp_path / "run.h5")
    page = report(run)
    stream = next(
        trace
        for trace in page.figures["activation-variance-profile"].data
        if trace.name == "residual stream"
    )
    array = run["activation/variance"]
    np.testing.assert_array_equal(
        np.asarray(stream.y, np.float32), array.values[-1, array.role.values == "block"]
    )
    texts = " ".join(one.text for one in page.contents.statements)
    assert "The loss fell" in texts
    assert "No NaN and no infinity" in texts
    labels = {trace.name for trace in page.figures["gradient-norm-profile"].data}
    assert {"in", "out"} <= labels or {"up", "down"} <= labels
    assert len(page.figures["weight-weibull_k-profile"].data) >= 2
