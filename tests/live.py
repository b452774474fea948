"""Train a small live model under a recorder and read back what it recorded."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dynscope

Loss = Callable[[Any], Tensor]


def squares(output: Tensor) -> Tensor:
    return output.float().square().mean()


def train(
    model: nn.Module,
    path: Path,
    batches: Iterable[Any],
    *,
    loss: Loss = squares,
    call: Callable[[nn.Module, Any], Any] = lambda model, batch: model(batch),
    **options: Any,
) -> dynscope.Run:
    """One plain SGD step for each of ``batches``, every one recorded at every leaf."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    settings: dict[str, Any] = {"every": 1, "sites": "leaves", "summary": False} | options
    with dynscope.attach(model, path, optimizer=optimizer, **settings):
        for batch in batches:
            optimizer.zero_grad()
            loss(call(model, batch)).backward()
            optimizer.step()
    return dynscope.load(path)


def site(run: dynscope.Run, metric: str, path: str, row: int = 0) -> float:
    """The value of a metric at one site, NaN where that site is not in the file."""
    return _at(run, metric, [s.path for s in run.sites], path, row)


def parameter(run: dynscope.Run, metric: str, name: str, row: int = 0) -> float:
    """The value of a metric of one parameter."""
    return _at(run, metric, [p.name for p in run.parameters], name, row)


def _at(run: dynscope.Run, metric: str, names: list[str], name: str, row: int) -> float:
    return float(run[metric].values[row, names.index(name)]) if name in names else float("nan")


def reasons(run: dynscope.Run, path: str) -> str:
    """Everything that the file says of what it lacks for ``path``."""
    return "; ".join(f"{gap.metric} {gap.reason}" for gap in run.coverage if gap.path == path)


def failures(run: dynscope.Run) -> list[str]:
    return [event.message for event in run.events if event.kind == "failure"]
