"""Train a set of architectures over one seed or several, and write their comparison.

python -m examples.compare pre_ln mix_ln --depth 12 --data book.txt --seeds 3
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if not __package__:  # started as a file: python examples/compare.py
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dynscope
from dynscope import reports
from examples.language_model import Size
from examples.text import Text
from examples.train import Data, Depth, Recipe, check, sized, train


def record(
    architectures: Sequence[str],
    folder: Path,
    text: Text,
    recipe: Recipe,
    size: Size,
    seeds: Sequence[int] = (0,),
) -> list[Path]:
    """Train each architecture from each seed on the same batches: ``folder/mix_ln.h5``, or
    ``folder/mix_ln-seed1.h5`` where there are several seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    paths = []
    with Progress(*columns, TimeRemainingColumn()) as progress:
        for architecture in architectures:
            for seed in seeds:
                name = architecture if len(seeds) == 1 else f"{architecture}-seed{seed}"
                path = folder / f"{name}.h5"
                steps = progress.track(range(recipe.steps), description=name)
                train(architecture, text, path, replace(recipe, seed=seed), size, steps)
                paths.append(path)
    return paths


def write_page(paths: Sequence[Path], page: Path) -> None:
    """One comparison of all runs, each called as its file is."""
    runs = [dynscope.load(path) for path in paths]
    page.write_text(reports.compare(runs, [path.stem for path in paths]).html, encoding="utf-8")


def main(
    architectures: Annotated[list[str], typer.Argument(help="two or more, as of examples.train")],
    depth: Depth = Size.blocks,
    width: int = Size.width,
    heads: int = Size.heads,
    context: int = Size.context,
    data: Data = "docs",
    steps: int = Recipe.steps,
    batch: int = Recipe.batch,
    lr: float = Recipe.learning_rate,
    seeds: Annotated[int, typer.Option(help="how many, from 0")] = 1,
    folder: Annotated[Path, typer.Option(help="where runs and page go")] = Path("demo"),
) -> None:
    """Train a set of architectures over seeds and compare them on one page."""
    check(*architectures)
    if len(architectures) * seeds < 2:
        raise typer.BadParameter("give two architectures or more, or two seeds or more")
    recipe = Recipe(steps=steps, batch=batch, learning_rate=lr)
    size = sized(depth, width, heads, context)
    paths = record(architectures, folder, Text.of(data), recipe, size, range(seeds))
    page = folder / f"{'-'.join(architectures[:4])}.html"
    write_page(paths, page)
    print(f"Wrote {page}: open it in a browser\nNext: dynscope report {paths[-1]}")


if __name__ == "__main__":
    typer.run(main)
