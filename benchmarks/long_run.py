"""A long run by simulation: a million rows through the writer: python -m benchmarks.long_run [--rows N]

Rows of 12 sites, 20 parameters and a scalar go through the feed to the writer process as fast as it takes
them. Printed for each tenth of the run: microseconds of the training's time per row, and the memory of
both processes; at the end the file's size beside what docs/file-format.md says.
"""

import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer

from dynscope.catalogue import bundle
from dynscope.reading.run import load
from dynscope.runfile import storage
from dynscope.runfile.schema import Header
from dynscope.site import Parameter, Site
from dynscope.writing.feed import Feed

SITES, PARAMETERS = 12, 20


def row(random: np.random.Generator, header: Header) -> dict[str, np.ndarray]:
    """Numbers for every metric of one recorded step."""
    sizes = {"site": SITES, "parameter": PARAMETERS, "group": 1}
    found = {}
    for metric in header.metrics:
        if metric.axes[0] == "step":
            shape = (sizes[metric.axes[1]], 3) if "top" in metric.axes else (sizes[metric.axes[1]],)
            found[metric.name] = random.standard_normal(shape)
    return found


def memory(process: int | str) -> float:
    """Resident memory in MB."""
    line = next(
        line for line in Path(f"/proc/{process}/status").read_text().splitlines() if "VmRSS" in line
    )
    return int(line.split()[1]) / 1e3


def wait_for(path: Path, step: int) -> None:
    """Until that many rows are committed."""
    done = 0
    while done < step:
        with storage.reading(path) as file:
            done = storage.committed_sizes(file)["step"]
        time.sleep(0.005)


def writer() -> int:
    """The writer is this process's only child."""
    threads = Path("/proc/self/task").iterdir()
    return int(next(c for t in threads for c in (t / "children").read_text().split()))


def main(
    rows: int = 1_000_000,
    metrics: Annotated[str, typer.Option(help="light, standard or full")] = "light",
    folder: Annotated[Path | None, typer.Option(help="where; a temporary folder else")] = None,
) -> None:
    """Send a million rows through the writer and watch time, memory and size."""
    header = Header(metrics=bundle(metrics), optimizer_groups=1)
    random = np.random.default_rng(0)
    values = [row(random, header) for _ in range(64)]
    with TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "run.h5"
        feed = Feed(path, header)
        feed.sites([Site(f"blocks.{i}", "block", 0, i) for i in range(SITES)])
        feed.parameters([Parameter(f"blocks.{i}.w", "ffn", 0, i) for i in range(PARAMETERS)])
        child = writer()
        print("| rows | µs per row (median) | rows per second | trainer MB | writer MB | file MB |")
        print("| --- | --- | --- | --- | --- | --- |")
        for part in range(10):
            spent, began = [], time.perf_counter()
            for step in range(part * rows // 10 + 1, (part + 1) * rows // 10 + 1):
                started = time.perf_counter()
                feed.row(step, time.time(), values[step % 64])
                feed.scalars(step, time.time(), {"loss": 1 / step})
                spent.append(time.perf_counter() - started)
                if (
                    step % 2000 == 0
                ):  # the writer sets the pace: nothing may pile up in either process
                    wait_for(path, step - 4000)
            rate = len(spent) / (time.perf_counter() - began)
            size = path.stat().st_size / 1e6
            print(
                f"| {step:,} | {1e6 * median(spent):.0f} | {rate:,.0f} | {memory('self'):.0f} | "
                f"{memory(child):.0f} | {size:,.0f} |",
                flush=True,
            )
        live = path.stat().st_size
        feed.close()
        run = load(path)
        assert len(run.steps) == rows and not run.coverage, run.coverage[:3]
        payload = sum(each.size * 4 for each in values[0].values()) + 8 * 5
        print(
            f"live {live / rows:.0f} bytes a row, of which {payload} are numbers of metrics; ",
            end="",
        )
        print(f"closed {path.stat().st_size / rows:.0f}")


if __name__ == "__main__":
    typer.run(main)
