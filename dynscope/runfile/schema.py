"""What a run file holds: its datasets, their axes and types, and how text is put into cells.

Nothing here opens a file. `docs/file-format.md` states the same in words and a test compares them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dynscope.catalogue import Metric
from dynscope.errors import InputError

FORMAT = "dynscope-run"
FORMAT_VERSION = 1

GROWING: tuple[str, ...] = (
    "step", "weight_step", "scalar", "event", "gap", "site", "parameter", "overflow",
)  # fmt: skip
"""The growing axes, in the order of ``/committed``; each is a dimension scale in the root group."""

COORDINATES: frozenset[str] = frozenset({"step", "weight_step", "top", "group", "overflow"})
"""Axes whose scale holds values; the others are dimensions only."""

TOP = 3
OVERFLOW_MARK = "\x1e"
"""Stands in the cell of a text too long for it; JSON always escapes this control character."""


@dataclass(frozen=True)
class Column:
    """A one-dimensional dataset of the file: where it is, along which axis, of which type."""

    path: str
    axis: str
    dtype: str
    meaning: str


COLUMNS: tuple[Column, ...] = (
    Column("clock/time", "step", "f8", "seconds since 1970, UTC"),
    Column("clock/tokens", "step", "i8", "tokens trained on up to this step, -1 where not told"),
    Column("clock/segment", "step", "i8", "0, and one more each time that the run was resumed"),
    Column("clock/cost", "step", "f8", "seconds that dynscope added to this step"),
    Column("clock/weight_time", "weight_step", "f8", "seconds since 1970, UTC"),
    Column("clock/weight_segment", "weight_step", "i8", "as clock/segment"),
    Column("sites/path", "site", "S256", "module path; empty for the root module"),
    Column("sites/role", "site", "S32", "role in the architecture"),
    Column("sites/stack", "site", "i8", "which depth axis: encoder 0, decoder 1"),
    Column("sites/depth", "site", "i8", "0-based index of the block, -1 outside the blocks"),
    Column("sites/type", "site", "S256", "class name of the module"),
    Column("sites/dtype", "site", "S32", "type of the output's numbers"),
    Column("sites/aliases", "site", "S256", "other paths of the same module, a JSON list"),
    Column("parameters/name", "parameter", "S256", "name of the parameter"),
    Column("parameters/role", "parameter", "S32", "role of the module that owns it"),
    Column("parameters/stack", "parameter", "i8", "as sites/stack"),
    Column("parameters/depth", "parameter", "i8", "as sites/depth"),
    Column("parameters/shape", "parameter", "S256", "a JSON list"),
    Column("parameters/numel", "parameter", "i8", "number of elements"),
    Column("parameters/trainable", "parameter", "i8", "1 where the optimizer may change it"),
    Column("parameters/group", "parameter", "i8", "optimizer parameter group, -1 for none"),
    Column("parameters/part_of", "parameter", "S256", "the fused parameter it is a part of"),
    Column("scalars/step", "scalar", "i8", "optimizer step"),
    Column("scalars/time", "scalar", "f8", "seconds since 1970, UTC"),
    Column("scalars/name", "scalar", "S64", "name given by the user"),
    Column("scalars/value", "scalar", "f8", "value"),
    Column("events/step", "event", "i8", "optimizer step"),
    Column("events/time", "event", "f8", "seconds since 1970, UTC"),
    Column("events/kind", "event", "S32", "kind of event"),
    Column("events/message", "event", "S256", "what happened"),
    Column("coverage/step", "gap", "i8", "optimizer step from which it holds"),
    Column(
        "coverage/kind",
        "gap",
        "S32",
        "what is missing: a site, a parameter, rows, a metric that nothing in the run has",
    ),
    Column("coverage/path", "gap", "S256", "module path or parameter name, empty for all"),
    Column("coverage/metric", "gap", "S64", "metric, empty for all"),
    Column("coverage/reason", "gap", "S256", "why"),
)

RESERVED = frozenset(c.path.split("/")[0] for c in COLUMNS) | {*GROWING, *COORDINATES, "committed"}
_METRIC_NAME = re.compile(r"[A-Za-z]\w*/[A-Za-z]\w*", re.ASCII)
_INTEGERS = frozenset({"massive/channel", "massive/token", "massive/batch"})


def metric_dtype(name: str) -> str:
    """Type of a metric's numbers in the file, as numpy spells it."""
    if name in _INTEGERS:
        return "i8"
    short = name.split("/")[-1]
    return "f8" if short in ("count", "n_calls") or short.endswith("_count") else "f4"


def missing(dtype: str) -> float:
    """What stands in a cell that was never written: NaN, or -1 for integers."""
    return -1 if np.dtype(dtype).kind == "i" else float("nan")


@dataclass(frozen=True)
class Header:
    """What is known of a run before its first row; all of it can be written as JSON.

    ``metrics`` are all the datasets that will ever exist in the file, the user's own among them.
    ``config`` is the user's, ``settings`` are dynscope's (interval, bundle, conventions),
    ``versions`` name what recorded the run, ``anatomy`` is what was decided about the model, as an
    indented tree. ``optimizer_groups`` is the length of the group axis. ``segments`` are the
    config, settings and versions of the segments before, as `dynscope.reading.run.Metadata` has them.
    """

    metrics: tuple[Metric, ...]
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    anatomy: str = ""
    optimizer_groups: int = 0
    segments: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for metric in self.metrics:
            if not _METRIC_NAME.fullmatch(metric.name) or metric.group in RESERVED:
                raise InputError(
                    f"Metric name {metric.name!r} does not fit: write group/name in letters, "
                    f"digits and underscores; the groups {', '.join(sorted(RESERVED))} are taken"
                )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Header":
        metrics = (Metric(**{**m, "axes": tuple(m["axes"])}) for m in content["metrics"])
        segments = tuple(content.get("segments", ()))
        return cls(**{**content, "metrics": tuple(metrics), "segments": segments})


def to_json(value: Any) -> str:
    """JSON of anything; what JSON does not know is written as its ``str``."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """A number of numpy or torch as it is, anything else as text."""
    is_number = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_number else str(value)


def encode(text: str) -> bytes:
    """Text as it stands in the file: a JSON string without its outer quotes, in UTF-8.

    Exact also for NUL and lone surrogates, which become JSON escapes (two surrogates that make a
    pair come back as the character they stand for); ordinary names, also with ``/``, ``.``, ``%``
    and letters of any language, stay readable as they are.
    """
    body = json.dumps(text, ensure_ascii=False)[1:-1]
    return re.sub("[\ud800-\udfff]", lambda m: f"\\u{ord(m[0]):04x}", body).encode()


def decode(raw: bytes, overflow: bytes = b"") -> str:
    """The text of a cell; ``overflow`` is the run file's ``/overflow``."""
    head, mark, tail = raw.rpartition(OVERFLOW_MARK.encode())
    if mark:
        start, length = map(int, tail.split(b","))
        raw = head + overflow[start : start + length]
    return str(json.loads(b'"' + raw + b'"')) if b"\\" in raw else raw.decode()


def fit(raw: bytes, width: int, offset: int) -> tuple[bytes, bytes]:
    """An encoded text as a cell of ``width`` bytes and what of it goes to ``/overflow``."""
    if len(raw) <= width:
        return raw, b""
    # Room for the mark and two 10-digit numbers; whole characters only, so that other tools
    # can show the cell. decode joins the bytes before it reads escapes.
    head = raw[: max(0, width - 24)].decode(errors="ignore").encode()
    rest = raw[len(head) :]
    return head + f"{OVERFLOW_MARK}{offset},{len(rest)}".encode(), rest
