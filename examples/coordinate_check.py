"""muP's coordinate check: do activations after a few steps depend on the width?

python -m examples.coordinate_check

Trains Peri-LN and muP at several widths with one learning rate and compares the size of the last block's
output and of the logits from width to width, as recorded. Under muP (Yang et al., arXiv 2203.03466)
they keep their size; in the standard parametrization they grow.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import dynscope
from examples.language_model import Size
from examples.text import Text
from examples.train import Recipe, train

WIDTHS = (64, 128, 256, 512)
ARCHITECTURES = ("peri_ln", "mup")
RECIPE = Recipe(steps=8, batch=4, learning_rate=1e-2, every=1, warm_up=0.0)


def moved(run: dynscope.Run, path: str) -> float:
    """How much the rms of a module's output has changed from the first step to the last."""
    rms = run["activation/rms"]
    here = np.asarray(rms[:, rms["path"] == path], np.float64)[:, 0]
    return float(abs(here[-1] - here[0]))


def slope(widths: Sequence[int], changes: Sequence[float]) -> float:
    """Exponent of the change in the width; 0 where it does not matter."""
    return float(np.polyfit(np.log(widths), np.log(np.maximum(changes, 1e-9)), 1)[0])


def check(
    folder: Path, widths: Sequence[int] = WIDTHS, recipe: Recipe = RECIPE
) -> dict[str, float]:
    """The exponent of the logits' change in the width, for each architecture."""
    folder.mkdir(parents=True, exist_ok=True)
    text, found = Text.read(), {}
    for architecture in ARCHITECTURES:
        changes = []
        for width in widths:
            path = folder / f"{architecture}-{width}.h5"
            train(architecture, text, path, recipe, Size.of(4, width), sites=["blocks.*", "head"])
            changes.append(moved(dynscope.load(path), "head"))
            print(f"{architecture:8} width {width:4}: logits' rms changed by {changes[-1]:.3f}")
        found[architecture] = slope(widths, changes)
    return found


def main(
    folder: Annotated[Path, typer.Option(help="where the runs go")] = Path("demo/coordinates"),
) -> None:
    """Compare how activations change with training, from width to width."""
    for architecture, exponent in check(folder).items():
        print(f"{architecture}: the change grows like width^{exponent:.2f}")


if __name__ == "__main__":
    typer.run(main)
