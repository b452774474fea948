"""The training runs that several studies read, made once and kept.

A run that is there, finished and made by the same settings is not made again, so a study that was
interrupted goes on where it was.
"""

from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch

import dynscope
from examples.language_model import LanguageModel, Size
from examples.text import Text
from examples.train import Recipe, train
from examples.zoo import ARCHITECTURES

FOLDER = Path("demo/studies")
SEEDS = (0, 1, 2)
SIZE = Size()
"""12 blocks, width 128: 2.4 million parameters."""
RECIPE = Recipe(every=10, validate_every=100)
"""300 steps of 8 x 64 bytes of Python's documentation."""


@cache
def text(data: str) -> Text:
    return Text.of(data)


def run(
    architecture: str,
    seed: int,
    *,
    size: Size = SIZE,
    recipe: Recipe = RECIPE,
    data: str = "docs",
    label: str = "",
    folder: Path | None = None,
) -> dynscope.Run:
    """The recorded training, from ``folder`` if it is there."""
    folder = folder or FOLDER
    recipe = replace(recipe, seed=seed)
    path = folder / f"{architecture}{label and '-'}{label}-seed{seed}.h5"
    wanted = {"architecture": architecture, **asdict(size), **asdict(recipe)}
    if path.exists():
        found = dynscope.load(path)
        if found.metadata.closed and wanted.items() <= dict(found.metadata.config).items():
            return found
    folder.mkdir(parents=True, exist_ok=True)
    print(f"training {path.stem}", flush=True)
    model = train(architecture, text(data), path, recipe, size)
    torch.save(model.state_dict(), path.with_suffix(".pt"))
    return dynscope.load(path)


def trained(architecture: str, seed: int, size: Size = SIZE, label: str = "") -> LanguageModel:
    """The model at the end of `run`, with the weights it had then."""
    run(architecture, seed, size=size, label=label)
    path = FOLDER / f"{architecture}{label and '-'}{label}-seed{seed}.pt"
    model = ARCHITECTURES[architecture](size)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


def runs(architecture: str, seeds: Iterable[int] = SEEDS) -> list[dynscope.Run]:
    return [run(architecture, seed) for seed in seeds]
