"""Train one small language model, recorded with dynscope.

python -m examples.train --arch mix_ln --depth 12 --width 128 --data book.txt
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

if not __package__:  # started as a file: python examples/train.py
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dynscope
from examples.language_model import LanguageModel, Size
from examples.text import Text, batch
from examples.zoo import ARCHITECTURES, BEFORE_STEP, PARAMETER_GROUPS, STREAMS


@dataclass(frozen=True)
class Recipe:
    """Adam, linear warm-up, then a cosine down to a tenth of the peak."""

    steps: int = 300
    batch: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.0  # decoupled, as in AdamW
    warm_up: float = 0.1  # share of the steps
    seed: int = 0
    every: int = 5  # record every this many steps
    validate_every: int = 50
    bf16: bool = False
    compile: bool = False

    def rate(self, step: int) -> float:
        """The learning rate of a step counted from 0, as a share of the peak."""
        warm_up = max(1, round(self.steps * self.warm_up))
        if step < warm_up:
            return (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, tokens: Tensor, context: int) -> Tensor:
    """The loss on 32 fixed windows of text that training never sees."""
    model.eval()
    loss = loss_of(model, *batch(tokens, 32, context, torch.Generator().manual_seed(0)))
    model.train()
    return loss


def start(architecture: str, recipe: Recipe, size: Size) -> tuple[LanguageModel, torch.optim.Adam]:
    """The model as its seed makes it, and its optimizer."""
    torch.manual_seed(recipe.seed)
    model = ARCHITECTURES[architecture](size)
    groups = PARAMETER_GROUPS.get(architecture)
    parameters: Iterable[Any] = (
        groups(model, recipe.learning_rate) if groups else model.parameters()
    )
    return model, torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )


def train(
    architecture: str,
    text: Text,
    path: Path,
    recipe: Recipe,
    size: Size,
    steps: Iterable[int] | None = None,
    sites: str | Sequence[str] = "blocks",
) -> LanguageModel:
    """Train and record into ``path``, which is overwritten; the same arguments give the same run.

    ``sites``: as of `dynscope.attach`. ``steps`` stands in for ``range(recipe.steps)``, for a progress bar around it.
    """
    # Matrices this small gain little from a second thread, and wait long for it on a busy machine.
    torch.set_num_threads(1)
    model, optimizer = start(architecture, recipe, size)
    running: nn.Module = torch.compile(model) if recipe.compile else model  # type: ignore[assignment]
    random = torch.Generator().manual_seed(recipe.seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate)
    before_step = BEFORE_STEP.get(architecture)
    config = {"architecture": architecture, **asdict(size), **asdict(recipe)}
    if not math.isnan(text.entropy_rate):
        config["entropy_rate"] = text.entropy_rate
    with dynscope.attach(
        running,
        path,
        optimizer=optimizer,
        every=recipe.every,
        name=architecture,
        config=config,
        overwrite=True,
        sites=sites,
        summary=False,
        streams=STREAMS.get(architecture),
    ) as scope:
        for step in steps or range(recipe.steps):
            if before_step:
                before_step(model, step / recipe.steps)
            inputs, targets = batch(text.train, recipe.batch, size.context, random)
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bf16):
                loss = loss_of(running, inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            scope.log(loss=loss, tokens=inputs.numel())
            if (step + 1) % recipe.validate_every == 0 or step + 1 == recipe.steps:
                scope.log(validation_loss=validate(running, text.validation, size.context))
    return model


Depth = Annotated[int, typer.Option(help="number of blocks")]
Data = Annotated[str, typer.Option(help="'docs', 'markov', or a text file of your own")]


def main(
    arch: Annotated[str, typer.Option(help=", ".join(ARCHITECTURES))] = "pre_ln",
    depth: Depth = Size.blocks,
    width: int = Size.width,
    heads: int = Size.heads,
    context: int = Size.context,
    data: Data = "docs",
    steps: int = Recipe.steps,
    batch: int = Recipe.batch,
    lr: float = Recipe.learning_rate,
    weight_decay: float = Recipe.weight_decay,
    warm_up: float = Recipe.warm_up,
    seed: int = Recipe.seed,
    every: Annotated[int, typer.Option(help="record every this many steps")] = Recipe.every,
    compile: bool = Recipe.compile,
    bf16: bool = Recipe.bf16,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the run file")] = None,
    force: Annotated[bool, typer.Option("--force", help="write over an existing file")] = False,
) -> None:
    """Train one small language model, recorded with dynscope."""
    check(arch)
    path = output or Path(f"{arch}.h5")
    if path.exists() and not force:
        raise typer.BadParameter(f"{path} exists: give another --output, or --force")
    recipe = Recipe(
        steps, batch, lr, weight_decay, warm_up, seed, every, bf16=bf16, compile=compile
    )
    size, text = sized(depth, width, heads, context), Text.of(data)
    train(arch, text, path, recipe, size, track(range(steps), description=arch))
    print(f"Wrote {path}\nNext: dynscope report {path}")


def check(*architectures: str) -> None:
    for each in architectures:
        if each not in ARCHITECTURES:
            raise typer.BadParameter(f"{each!r} is none of {', '.join(ARCHITECTURES)}")


def sized(depth: int, width: int, heads: int, context: int) -> Size:
    try:
        return Size.of(depth, width, heads, context)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


if __name__ == "__main__":
    typer.run(main)
