"""Write docs/metrics.md from the catalogue: `make docs`."""

from pathlib import Path

from dynscope.catalogue import METRICS, Metric

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Metrics

Written by `make docs` from `dynscope/catalogue.py`. A name here is the dataset in the run file, the key of `run[...]` and the name
in the report. The bundle is the cheapest one that records the metric: light, standard (the default) or full.
"""


def entry(metric: Metric) -> str:
    """One metric as a paragraph: what it is, how to read it, where it comes from."""
    definition = metric.definition[:1].upper() + metric.definition[1:]
    axes = " × ".join(metric.axes)
    return (
        f"### `{metric.name}`\n\n{definition}. {metric.reading}\n\n"
        f"*Unit: {metric.unit}; {axes}; {metric.bundle} bundle; {metric.source}.*\n"
    )


def page() -> str:
    return "\n".join([HEAD, *map(entry, METRICS.values())])


if __name__ == "__main__":
    PAGE.write_text(page())
