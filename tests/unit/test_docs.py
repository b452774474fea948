"""Generated pages are those that their script would write now."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_metrics_is_that_of_the_catalogue() -> None:
    page: str = runpy.run_path(str(DOCS / "metrics.py"))["page"]()
    assert (DOCS / "metrics.md").read_text() == page, "run `make docs`"
