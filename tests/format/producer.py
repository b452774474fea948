"""A training process for the kill tests: rows as fast as asked, and a note of each step's end.

Usage: python producer.py RUN NOTES STEPS DELAY [thread]. A row's values are ``step + column / 1000``; NOTES
gets ``step seconds`` after each step, so that a test knows which steps had ended before a kill.
"""

import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np

from dynscope.catalogue import METRICS
from dynscope.runfile.schema import Header
from dynscope.site import Parameter, Site
from dynscope.writing import link
from dynscope.writing.feed import Feed

SITES = 13
METRIC_NAMES = (
    "activation/variance",
    "activation/count",
    "massive/value",
    "gradient/norm",
    "weight/norm",
)


def header() -> Header:
    return Header(metrics=tuple(METRICS[name] for name in METRIC_NAMES))


def values(step: int, dtype: str = "f8") -> np.ndarray:
    return (step + np.arange(SITES) / 1000).astype(dtype)


def describe(feed: Feed) -> None:
    feed.sites([Site(f"blocks.{i}", "block", 0, i) for i in range(SITES)])
    feed.parameters([Parameter(f"blocks.{i}.weight", "ffn", 0, i) for i in range(SITES)])


def record(feed: Feed, step: int) -> None:
    now = time.time()
    row = {
        "activation/variance": values(step),
        "activation/count": values(step),
        "massive/value": np.stack([values(step)] * 3, axis=1),
        "gradient/norm": values(step),
    }
    feed.row(step, now, row)
    feed.scalars(step, now, {"loss": step / 2})
    if step % 10 == 1:
        feed.weights(step, now, {"weight/norm": values(step)})


def main() -> None:
    run, notes, steps, delay = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    if "thread" in sys.argv:
        mock.patch.object(link.ProcessLink, "_start", side_effect=link.NoProcess("told so")).start()
    feed = Feed(run, header())
    describe(feed)
    with Path(notes).open("w", buffering=1) as stream:
        for step in range(1, steps + 1):
            record(feed, step)
            stream.write(f"{step} {time.monotonic()}\n")
            time.sleep(delay)
    feed.close()


if __name__ == "__main__":
    main()
