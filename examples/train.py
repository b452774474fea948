"""Train one small language model on plain text, recorded with dynscope.

python -m examples.train mix_ln run.h5 --steps 300 --text book.txt
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

import dynscope
from examples import mix_ln, pre_ln
from examples.language_model import LanguageModel, Size
from examples.text import Text, batch

ARCHITECTURES: dict[str, Callable[[Size], LanguageModel]] = {
    "pre_ln": pre_ln.build,
    "mix_ln": mix_ln.build,
}


@dataclass(frozen=True)
class Recipe:
    """Adam, linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""

    steps: int = 300
    batch: int = 8
    learning_rate: float = 1e-3
    seed: int = 0
    every: int = 5  # record every this many steps
    validate_every: int = 50

    def rate(self, step: int) -> float:
        """The learning rate of a step counted from 0, as a share of the peak."""
        warm_up = max(1, self.steps // 10)
        if step < warm_up:
            return (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, tokens: Tensor, context: int) -> Tensor:
    """The loss on 32 fixed windows of text that training never sees."""
    model.eval()
    loss = loss_of(model, *batch(tokens, 32, context, torch.Generator().manual_seed(0)))
    model.train()
    return loss


def train(
    architecture: str,
    text: Text,
    path: Path,
    recipe: Recipe,
    size: Size,
    steps: Iterable[int] | None = None,
) -> LanguageModel:
    """Train and record into ``path``, which is overwritten.

    ``steps`` stands in for ``range(recipe.steps)``, for a progress bar around it.
    """
    # Matrices this small gain little from a second thread, and wait long for it on a busy machine.
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    random = torch.Generator().manual_seed(recipe.seed)
    model = ARCHITECTURES[architecture](size)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate)
    config = {"architecture": architecture, **asdict(size), **asdict(recipe)}
    with dynscope.attach(
        model,
        path,
        optimizer=optimizer,
        every=recipe.every,
        name=architecture,
        config=config,
        overwrite=True,
    ) as scope:
        for step in steps or range(recipe.steps):
            loss = loss_of(model, *batch(text.train, recipe.batch, size.context, random))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            scope.log(loss=loss)
            if (step + 1) % recipe.validate_every == 0:
                scope.log(validation_loss=validate(model, text.validation, size.context))
    return model


def main(
    architecture: Annotated[str, typer.Argument(help=" or ".join(ARCHITECTURES))],
    path: Annotated[Path, typer.Argument(help="the run file to write")],
    steps: int = 300,
    seed: int = 0,
    text: Annotated[Path | None, typer.Option(help="a text file of your own")] = None,
) -> None:
    """Train one small language model on plain text, recorded with dynscope."""
    if architecture not in ARCHITECTURES:
        raise typer.BadParameter(f"{architecture!r} is none of {', '.join(ARCHITECTURES)}")
    recipe = Recipe(steps=steps, seed=seed)
    bar = track(range(steps), description=architecture)
    train(architecture, Text.read(text), path, recipe, Size(), bar)


if __name__ == "__main__":
    typer.run(main)
