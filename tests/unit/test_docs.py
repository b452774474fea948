"""The docs say what the code does; generated pages are those that their script would write now."""

import runpy
from pathlib import Path

from dynscope.catalogue import METRICS
from dynscope.hooks.training.parameters import UPDATE_SAMPLE

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_metrics_is_that_of_the_catalogue() -> None:
    page: str = runpy.run_path(str(DOCS / "metrics.py"))["page"]()
    assert (DOCS / "metrics.md").read_text() == page, "run `make docs`"


def test_the_sample_of_an_update_is_as_large_as_it_is_said_to_be() -> None:
    said = f"{UPDATE_SAMPLE:,} elements"
    assert said in METRICS["update/norm"].definition
    assert said in (DOCS / "recording.md").read_text()
