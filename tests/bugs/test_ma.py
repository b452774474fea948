"""Massive activations in live models; one test per reported case."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynscope
from tests.live import train

pytestmark = pytest.mark.usefixtures("quick_writer")


class Spiking(nn.Module):
    """Adds a spike to what its layer gives."""

    def __init__(self, layer: nn.Module, index: tuple[int, ...], after: nn.Module) -> None:
        super().__init__()
        self.layer, self.spiked, self.index = layer, after, index

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        spike = torch.zeros_like(y)
        spike[self.index] = 5000.0
        return self.spiked(y + spike)


def place(run: dynscope.Run) -> tuple[int, int, int, float, float]:
    """Channel, token, batch, ratio and count at the spiked site."""
    row = [s.path for s in run.sites].index("spiked")
    channel, token, batch = (
        int(run[f"massive/{axis}"].values[0, row, 0]) for axis in ("channel", "token", "batch")
    )
    ratio, count = (
        float(run[f"activation/massive_{n}"].values[0, row]) for n in ("ratio", "count")
    )
    return channel, token, batch, ratio, count


def test_ma_02_mostly_zero_outputs_are_not_flagged(tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.activation = nn.Linear(8, 8), nn.ReLU()

        def forward(self, x: Tensor) -> Any:
            return self.activation(self.layer(x) - 1)

    torch.manual_seed(0)
    run = train(Sparse(), tmp_path / "run.h5", [torch.randn(16, 8)])
    row = [s.path for s in run.sites].index("activation")
    assert run["activation/zero_fraction"].values[0, row] > 0.5
    assert math.isnan(run["activation/massive_ratio"].values[0, row])
    assert run["activation/massive_count"].values[0, row] == 0


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_ma_03_channels_of_convolutions_in_any_memory_order(
    tmp_path: Path, memory: torch.memory_format
) -> None:
    model = Spiking(nn.Conv2d(3, 8, 3, padding=1), (1, 3, 2, 4), nn.BatchNorm2d(8).eval())
    model = model.to(memory_format=memory)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 5, 6).to(memory_format=memory)
    run = train(model, tmp_path / "run.h5", [x])
    channel, token, batch, ratio, count = place(run)
    assert (channel, token, batch, count) == (3, 2 * 6 + 4, 1, 1)
    assert ratio > 1000


@pytest.mark.parametrize(
    ("shape", "index", "wanted"),
    [
        ((2, 7, 8), (1, 5, 3), (3, 5, 1)),  # batch, tokens, channels
        ((7, 8), (5, 3), (3, -1, 5)),  # rows, channels
        ((2, 3, 7, 8), (1, 2, 5, 3), (3, 5, 5)),  # batch, heads, tokens, channels
    ],
)
def test_ma_03_05_the_place_of_a_spike_is_stored_not_assumed(
    tmp_path: Path, shape: tuple[int, ...], index: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    model = Spiking(nn.Linear(8, 8), index, nn.Identity())
    run = train(model, tmp_path / "run.h5", [torch.randn(shape)])
    assert place(run)[:3] == wanted


def test_ma_03_models_with_tokens_first(tmp_path: Path) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.spiked = nn.LSTM(8, 8, batch_first=False), nn.Identity()

        def forward(self, x: Tensor) -> Any:
            y, _ = self.rnn(x)
            spike = torch.zeros_like(y)
            spike[5, 1, 3] = 5000.0
            return self.spiked(y + spike)

    run = train(Recurrent(), tmp_path / "run.h5", [torch.randn(7, 2, 8)])
    assert place(run)[:3] == (3, 5, 1)


@pytest.mark.parametrize(("largest", "median", "flagged"), [(500.0, 0.3, 1), (150.0, 1.0, 0)])
def test_ma_02_a_massive_activation_is_above_100_and_a_thousand_medians(
    tmp_path: Path, largest: float, median: float, flagged: int
) -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.hidden = nn.Identity()

        def forward(self, x: Tensor) -> Any:
            return self.hidden(x * self.scale)

    x = torch.full((2, 64, 8), median)
    x[0, 3, 5] = largest
    run = train(Given(), tmp_path / "run.h5", [x])
    row = [s.path for s in run.sites].index("hidden")
    assert run["activation/massive_count"].values[0, row] == flagged
    assert run["activation/massive_ratio"].values[0, row] == pytest.approx(
        largest / median, rel=0.01
    )
