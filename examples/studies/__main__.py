"""Do the studies and write docs/reproduction.md: `make reproduce`, or some by name.

python -m examples.studies variance gradient     (--list names them; --again does them anew)
"""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from examples.studies import depth, inside, shapes, start, training
from examples.studies.page import write
from examples.studies.runs import SEEDS
from examples.studies.study import RESULTS, Study, keep


class Entry(NamedTuple):
    study: Study
    seeds: tuple[int, ...]


EIGHT, ONE = tuple(start.SEEDS), (0,)
STUDIES = {
    "gradients_at_start": Entry(start.gradients, EIGHT),
    "hidden_norms": Entry(start.hidden_norms, EIGHT),
    "peri_at_start": Entry(start.peri, EIGHT),
    "moment_rules": Entry(start.moment_rules, ONE),
    "rms_norm": Entry(start.rms_norm, ONE),
    "mixing": Entry(depth.mixing, SEEDS),
    "variance": Entry(depth.variance, SEEDS),
    "gradient": Entry(depth.gradient, SEEDS),
    "angle": Entry(depth.angle, SEEDS),
    "weibull": Entry(depth.weibull, SEEDS),
    "gates": Entry(inside.gates, SEEDS),
    "streams": Entry(inside.streams, SEEDS),
    "depth_weights": Entry(inside.depth_weights, SEEDS),
    "saturation": Entry(inside.saturation, SEEDS),
    "warm_up": Entry(training.warm_up, SEEDS),
    "model_update": Entry(training.model_update, SEEDS),
    "learning_rate": Entry(training.learning_rate, SEEDS),
    "weight_law": Entry(training.weight_law, SEEDS),
    "coordinates": Entry(training.coordinates, ONE),
    "norm_removal": Entry(training.norm_removal, SEEDS),
    "shapes": Entry(shapes.shapes, ONE),
    "thousand": Entry(shapes.thousand, ONE),
}


def results() -> list[dict[str, Any]]:
    """What is kept of every study that was done, in the order above."""
    files = [RESULTS / f"{name}.json" for name in STUDIES]
    return [json.loads(path.read_text(encoding="utf-8")) for path in files if path.exists()]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="by default those not done yet")] = None,
    again: Annotated[bool, typer.Option("--again", help="all of them, also those done")] = False,
    list_: Annotated[bool, typer.Option("--list", help="name them with their minutes")] = False,
    docs: Annotated[Path, typer.Option(help="the folder of reproduction.md")] = Path("docs"),
) -> None:
    """Check the literature's claims by training; training that was done before is not repeated."""
    if unknown := set(names or ()) - set(STUDIES):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: none of {', '.join(STUDIES)}")
    done = {kept["study"]: kept for kept in results()}
    if list_:
        for name, entry in STUDIES.items():
            minutes = f"{done[name]['minutes']} min" if name in done else "not done"
            print(f"{name:20}{minutes:>10}  {(entry.study.__doc__ or '').splitlines()[0]}")
        return
    wanted = names or [name for name in STUDIES if again or name not in done]
    for name in wanted:
        print(f"== {name}", flush=True)
        keep(name, STUDIES[name].study, STUDIES[name].seeds)
    write(results(), docs)
    if not wanted:
        print("The results of every study are here: --again does them anew, a name one of them.")
    print(f"Wrote {docs / 'reproduction.md'}")


if __name__ == "__main__":
    typer.run(main)
