"""Everything that a person looks at: figures, pages, comparisons.

`report` and `compare` turn runs into a `Report`: a page (``.html``) and Plotly figures
(``.figures``). Nothing here writes a file.
"""

from dynscope.reports.comparison import compare
from dynscope.reports.page import Report
from dynscope.reports.single import report

__all__ = ["Report", "compare", "report"]
