"""A chart of a page: a Plotly figure as plain data, and what a page may change in it.

The step slider of a page replaces arrays of a figure by other rows of the same matrix. A `Matrix`
is therefore kept once, and a `Binding` says which attribute of which trace shows it, and how.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Tone = Literal["", "good", "warn", "bad"]

How = Literal["row", "pairs", "map", "log map", "power map", "steps", "log steps"]

Spec = dict[str, Any]
"""A Plotly figure: {"data": [...], "layout": {...}}; `plotly.graph_objects.Figure(spec)` takes it."""


@dataclass(frozen=True)
class Matrix:
    """Numbers of one curve at every drawn step, (steps, depths), under a name of the page."""

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.floating]


@dataclass(frozen=True)
class Binding:
    """``attribute`` of trace ``trace`` shows ``matrices``.

    "row": the row at the slider's step; "pairs": the rows of several matrices, side by side;
    "map": all of it, transposed; "log map": its base-10 logarithm, and "power map": ten to its
    power, transposed; "steps": the steps of its rows, "log steps" as `axes.log_places` has them.
    """

    trace: int
    attribute: str
    matrices: tuple[Matrix, ...]
    how: How


@dataclass(frozen=True)
class Chart:
    """A figure with its place on the page.

    ``pick`` is whether several traces are seen at once, one, or one legend group; ``notes`` are
    sentences of which the slider picks one, by ``note_steps``, and ``captions`` what the legend then
    calls the last trace; ``time`` is the axis that is the training step, if any.
    """

    id: str
    title: str
    spec: Spec
    bindings: tuple[Binding, ...] = ()
    pick: Literal["many", "one", "group"] = "many"
    notes: tuple[str, ...] = ()
    note_steps: NDArray[np.int64] | None = None
    captions: tuple[str, ...] = ()
    time: Literal["x", ""] = ""
    log_button: bool = False


@dataclass(frozen=True)
class Card:
    """Charts of one quantity with the words that belong to them.

    ``remark`` says what this run did; ``charts`` is empty where there is nothing to draw.
    """

    id: str
    title: str
    unit: str
    definition: str
    reading: str
    source: str
    charts: tuple[Chart, ...] = ()
    remark: str = ""
    name: str = ""


@dataclass(frozen=True)
class Table:
    """A table of the page, for what is text; cells are shown as they are."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remark: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page, with its place in the contents."""

    id: str
    title: str
    lead: str
    cards: tuple[Card, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Tile:
    """A number that is seen first."""

    label: str
    value: str
    remark: str = ""
    tone: Tone = ""
    colour: str = ""


@dataclass(frozen=True)
class Statement:
    """A sentence of the summary and the card that shows why."""

    text: str
    tone: Tone = ""
    card: str = ""


@dataclass(frozen=True)
class Contents:
    """Everything on a page, before any markup."""

    title: str
    kicker: str
    badges: tuple[Tile, ...]
    statements: tuple[Statement, ...]
    tiles: tuple[Tile, ...]
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    slider: NDArray[np.int64]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    relative: bool = False
    hero: Chart | None = None
