"""Where the time of a recorded step goes: python -m benchmarks.where [--sites leaves].

On the model of benchmarks/overhead.py, by clocks around the recorder's own calls, which cost a
little themselves. A part is counted without the parts below it; the median of six steps.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

import typer

from benchmarks.overhead import STANDARD, Shape, Training, seconds
from dynscope.hooks.recording.steps import Steps
from dynscope.hooks.tensor.fused import Compilation
from dynscope.hooks.tensor.measure import Measure
from dynscope.hooks.training.parameters import ParameterWatch
from dynscope.hooks.watch.observation import Observer

PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "activations": ((Measure, "output"),),
    "their gradients, and inputs of norms": ((Measure, "gradient"), (Measure, "input")),
    "calling and bookkeeping of observations": ((Observer, "observe"),),
    "gradients of parameters": ((ParameterWatch, "read_gradients"),),
    "updates": ((ParameterWatch, "before_step"), (ParameterWatch, "after_step")),
    "the row, and the rest around the step": (
        (Steps, "_before"),
        (Steps, "_after"),
    ),
}


class Clocks:
    """Time spent in each part, less the time in the parts it calls."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._inside = [0.0]  # per running call, the time of those it made

    def watch(self, owner: type, name: str, part: str) -> None:
        """Put a clock around the method."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            started = time.perf_counter()
            result = method(*args, **kwargs)
            whole = time.perf_counter() - started
            self.spent[part] += whole - self._inside.pop()
            self._inside[-1] += whole
            return result

        setattr(owner, name, timed)


def main(sites: str = "blocks", steps: int = 6) -> None:
    """Print milliseconds per recorded step for each part, as markdown."""
    Compilation.shared().poll(wait=True)
    clocks = Clocks()
    for part, methods in PARTS.items():
        for owner, name in methods:
            clocks.watch(owner, name, part)
    whole, parts = [], []
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Shape(), STANDARD | {"sites": sites}, folder)
        for _ in range(steps + 2):
            clocks.spent.clear()
            whole.append(seconds(training.step))
            parts.append(dict(clocks.spent))
        training.close()
    print("| part | ms |\n| --- | --- |")
    for part in PARTS:
        print(f"| {part} | {1000 * statistics.median(p.get(part, 0.0) for p in parts[2:]):.1f} |")
    print(f"| the whole step | {1000 * statistics.median(whole[2:]):,.0f} |")


if __name__ == "__main__":
    typer.run(main)
