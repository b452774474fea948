"""A page's numbers as compact JSON that is safe inside a script element.

Arrays become Plotly's typed arrays ({"dtype", "bdata", "shape"}): float32 in base64, or one number
where all are alike. A matrix that several figures show is written once and referred to.
"""

import json
from base64 import b64encode
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynscope.reports.elements.charts import Binding, Chart, Matrix


def script_json(value: Any) -> str:
    """JSON that cannot end its script element nor open a comment in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def typed_array(values: NDArray[Any]) -> dict[str, Any]:
    """A float array in base64, little-endian, or its one value."""
    numbers = np.ascontiguousarray(values, "<f4")
    if numbers.size and numbers.tobytes() == numbers.flat[:1].tobytes() * numbers.size:
        only = float(numbers.flat[0])
        return {"fill": only if np.isfinite(only) else None, "shape": list(values.shape)}
    return {"f4": b64encode(numbers.tobytes()).decode(), "shape": list(values.shape)}


def chart_json(chart: Chart) -> dict[str, Any]:
    """A chart for the page's script: what a binding fills is left out of its figure."""
    bound = {(binding.trace, binding.attribute) for binding in chart.bindings}
    traces = [
        {key: _plain(value) for key, value in trace.items() if (place, key) not in bound}
        for place, trace in enumerate(chart.spec["data"])
    ]
    layout = {key: value for key, value in chart.spec["layout"].items() if key != "template"}
    return {
        "data": traces,
        "layout": _plain(layout),
        "bindings": [_binding(binding) for binding in chart.bindings],
        "pick": chart.pick,
        "notes": list(chart.notes),
        "captions": list(chart.captions),
        "noteSteps": [] if chart.note_steps is None else chart.note_steps.tolist(),
        "time": chart.time,
    }


def matrices_json(charts: Iterable[Chart]) -> dict[str, Any]:
    """Every matrix that the charts are bound to, once, with the steps of its rows."""
    found: dict[str, Matrix] = {}
    for chart in charts:
        for binding in chart.bindings:
            found |= {matrix.name: matrix for matrix in binding.matrices}
    steps = dict.fromkeys(tuple(matrix.steps.tolist()) for matrix in found.values())
    names = {key: str(place) for place, key in enumerate(steps)}
    return {
        "steps": {name: list(key) for key, name in names.items()},
        "matrices": {
            name: typed_array(matrix.values) | {"steps": names[tuple(matrix.steps.tolist())]}
            for name, matrix in found.items()
        },
    }


def _binding(binding: Binding) -> dict[str, Any]:
    names = [matrix.name for matrix in binding.matrices]
    return {"trace": binding.trace, "attribute": binding.attribute, "how": binding.how,
            "matrices": names}  # fmt: skip


def _plain(value: Any) -> Any:
    """Lists and numbers of JSON; numbers that JSON lacks become null, which Plotly leaves out."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist()) if value.dtype.kind != "f" else _significant(value)
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def _significant(values: NDArray[np.floating]) -> Any:
    """Float lists with six significant digits, enough for any screen."""
    if values.ndim > 1:
        return [_significant(row) for row in values]
    return [float(f"{one:.6g}") if np.isfinite(one) else None for one in values.tolist()]
