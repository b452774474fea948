"""Check the papers' claims on three seeds: `make reproduce`. Prints a table, one line a claim and seed.

The runs stay in demo/seed-0, demo/seed-1 and demo/seed-2, for `dynscope compare`.
"""

from pathlib import Path
from typing import Annotated

import typer

import dynscope
from examples.compare import record
from examples.demo import ARCHITECTURES, claims
from examples.language_model import Size
from examples.text import Text
from examples.train import Recipe


def main(
    folder: Annotated[Path, typer.Option(help="where the runs go")] = Path("demo"),
    seeds: int = 3,
    steps: int = Recipe.steps,
) -> None:
    """Train Pre-LN and Mix-LN from several seeds and print which claims held."""
    text, rows = Text.read(), []
    for seed in range(seeds):
        place = folder / f"seed-{seed}"
        place.mkdir(parents=True, exist_ok=True)
        pre, mix = map(
            dynscope.load, record(ARCHITECTURES, place, text, Recipe(steps=steps), Size(), [seed])
        )
        rows += [
            f"| {seed} | {'yes' if claim.held else 'no'} | {claim.text} |"
            for claim in claims(pre, mix)
        ]
    print("\n".join(["| seed | held | claim |", "| --- | --- | --- |", *rows]))


if __name__ == "__main__":
    typer.run(main)
