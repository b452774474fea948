"""Train Pre-LN and Mix-LN side by side and compare them on one page: `make demo`.

Writes demo/pre_ln.h5, demo/mix_ln.h5 and demo/compare.html, and says what the page shows, with
the numbers of these two runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

import dynscope
from examples.compare import record, write_page
from examples.language_model import Size
from examples.mix_ln import ALPHA
from examples.text import Text
from examples.train import Recipe

ARCHITECTURES = ("pre_ln", "mix_ln")


@dataclass(frozen=True)
class Claim:
    """A sentence of the literature in the numbers of this run, and whether it held."""

    held: bool
    text: str


def block_variance(run: dynscope.Run) -> NDArray[np.float64]:
    """Variance of every block's output, the residual stream, at the last recorded step: (block,)."""
    variance = run["activation/variance"][-1]
    return np.asarray(variance[variance.role == "block"].sortby("depth"), np.float64)


def block_gradient(run: dynscope.Run) -> NDArray[np.float64]:
    """Gradient norm of every block's parameters together, averaged over the run: (block,)."""
    squares = run["gradient/norm"] ** 2
    blocks = squares[:, squares.depth >= 0].groupby("depth").sum("parameter")
    return np.asarray((blocks**0.5).mean("step"), np.float64)


def claims(pre: dynscope.Run, mix: dynscope.Run) -> list[Claim]:
    """What the two papers say about Pre-LN and Mix-LN, read from two runs of the same depth."""
    stream, mixed = block_variance(pre), block_variance(mix)
    last, post = len(stream), int(ALPHA * len(mixed))
    growth = stream[-1] / stream[0]
    held = mixed[:post]
    falls = [float(g[0] / g[-1]) for g in (block_gradient(pre), block_gradient(mix))]
    return [
        Claim(
            bool(growth > 5),
            f"Pre-LN: the variance of the residual stream grows {growth:.1f} times "
            f"from block 1 to block {last}.",
        ),
        Claim(
            bool(np.all(np.abs(held - 1) < 0.05)),
            f"Mix-LN: its Post-LN blocks, 1 to {post}, hold the variance at 1 "
            f"({held.min():.2f} to {held.max():.2f}); the others then grow to {mixed[-1]:.1f}.",
        ),
        Claim(
            falls[1] < falls[0],
            f"Gradients: block 1 gets {falls[0]:.2f} times the gradient norm of block {last} "
            f"in Pre-LN, {falls[1]:.2f} times in Mix-LN (mean over training).",
        ),
    ]


def main(
    folder: Annotated[Path, typer.Option(help="where the runs and the page go")] = Path("demo"),
    text: Annotated[Path | None, typer.Option(help="a text file of your own")] = None,
    depth: Annotated[int, typer.Option(help="number of blocks", min=4)] = Size.blocks,
    steps: int = Recipe.steps,
    seed: int = Recipe.seed,
) -> None:
    """Train Pre-LN and Mix-LN side by side and compare them on one page."""
    size, recipe = Size(blocks=depth), Recipe(steps=steps)
    paths = record(ARCHITECTURES, folder, Text.read(text), recipe, size, [seed])
    pre, mix = map(dynscope.load, paths)
    page = folder / "compare.html"
    console = Console(highlight=False, soft_wrap=True)
    with console.status("Drawing the page"):
        write_page(paths, page)
    console.print(f"\nOpen [bold]{page}[/bold] in a browser. The two runs say, by depth:")
    for claim in claims(pre, mix):
        mark = "[green]✓[/green]" if claim.held else "[red]✗ not as expected:[/red]"
        console.print(f"  {mark} {claim.text}")
    console.print(f"\nThen: dynscope info {paths[0]}, dynscope report {paths[1]}")


if __name__ == "__main__":
    typer.run(main)
