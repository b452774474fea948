"""Colours, marks and Plotly templates.

Every colour has a contrast of at least 3:1 both on the light page and on the dark one, so that a
figure needs no second palette; roles differ by mark as well as by colour.
"""

from typing import Any

FONT = (
    'Inter, ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, '
    '"Liberation Sans", sans-serif'
)
PALETTE = (
    "#3d7be0", "#d9722e", "#1b9a86", "#9464d8", "#d4548e", "#8d8b1f", "#3f93ba", "#b0763f",
    "#5a9e3c", "#c94a4a",
)  # fmt: skip
GREY = "#7d8793"
BAND = "rgba(27, 154, 134, 0.18)"
SEQUENTIAL = "Viridis"
DIVERGING = (
    (0.0, "#2c5fc4"), (0.25, "#7fa6e6"), (0.5, "#e9e9e6"), (0.75, "#eea57a"), (1.0, "#c2520f"),
)  # fmt: skip

_ROLE_COLOURS = {
    "block": 0, "attention": 1, "ffn": 2, "mixer": 3, "cross_attention": 4, "embed": 7,
    "q": 0, "k": 6, "v": 3, "qkv": 0, "o": 1, "gate": 2, "up": 8, "gate_up": 2, "down": 5,
    "in": 2, "out": 5, "norm": 4, "head": 9, "router": 9, "experts": 8, "conv": 7,
}  # fmt: skip
_ROLE_MARKS = {
    "block": "circle", "attention": "square", "ffn": "diamond", "mixer": "triangle-up",
    "q": "circle", "k": "circle-open", "v": "square", "o": "square-open", "qkv": "circle",
    "gate": "diamond", "up": "diamond-open", "in": "diamond", "down": "triangle-up",
    "out": "triangle-up", "gate_up": "diamond",
}  # fmt: skip
MARKS = ("circle", "diamond", "square", "triangle-up", "x", "cross")


def role_colour(role: str, place: int) -> str:
    """The colour of a role; roles without one take the palette's by ``place``."""
    return PALETTE[_ROLE_COLOURS.get(role, place) % len(PALETTE)]


def role_mark(role: str) -> str:
    return _ROLE_MARKS.get(role, "circle")


def _template(text: str, quiet: str, grid: str, plot: str, label: str) -> dict[str, Any]:
    axis = {
        "gridcolor": grid, "linecolor": grid, "zerolinecolor": grid, "zerolinewidth": 1,
        "tickcolor": grid, "tickfont": {"color": quiet, "size": 11}, "automargin": True,
        "title": {"font": {"color": quiet, "size": 12}, "standoff": 8},
    }  # fmt: skip
    return {
        "layout": {
            "font": {"family": FONT, "size": 12, "color": text},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": plot,
            "colorway": list(PALETTE),
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {
                "bgcolor": label, "bordercolor": grid, "align": "left",
                "font": {"family": FONT, "size": 12, "color": text},
            },
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": quiet, "activecolor": text},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        }
    }  # fmt: skip


LIGHT = _template("#1c2128", "#5b6470", "#e3e6ea", "#f8f9fa", "#ffffff")
DARK = _template("#e6e9ed", "#98a2ae", "#2c323b", "#1a1e25", "#242a33")
