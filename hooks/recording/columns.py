"""The file's columns: sites as they are first called, parameters as the optimizer groups them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dynscope.hooks.model.anatomy import Anatomy
from dynscope.hooks.training.optimizer import Optimizers
from dynscope.hooks.watch.places import Places
from dynscope.hooks.watch.rows import Row
from dynscope.site import Parameter
from dynscope.structure.layouts import parts_of
from dynscope.writing.feed import Feed


class Columns:
    """``rows`` of the tally in the order of the file's sites."""

    def __init__(self, anatomy: Anatomy, places: Places, feed: Feed) -> None:
        self._anatomy, self._places, self._feed = anatomy, places, feed
        self.rows: list[int] = []

    def array(self) -> np.ndarray:
        """The rows now: int64, one per site of the file."""
        return np.array(self.rows, dtype=np.int64)

    def extend(self, order: Sequence[int]) -> None:
        """Tell the file of sites that were called for the first time; ``order`` has all so far."""
        rows, known = self._places.rows, set(self.rows)
        called = [row for row in order if row < len(self._places.sites)]
        new = [row for row in called if row not in known]
        if not new:
            return
        ordered = self._anatomy.ordered([rows[row].path for row in called])
        sites = {site.path: site for site in self._places.sites}  # also a stream's
        sites |= {site.path: site for site in ordered.sites}
        if not self._anatomy.by_call_order:
            new.sort()
        first = not self.rows
        self.rows += new
        described = [replace(sites[rows[r].path], dtype=_name(rows[r].dtypes[0])) for r in new]
        self._feed.sites(described, anew=first)


def retyped(rows: Sequence[Row]) -> str:
    """Outputs came in another dtype than before, after ``model.to(dtype)`` for instance."""
    was, now = rows[0].dtypes[0], rows[0].dtypes[-1]
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return f"{rows[0].path}{more}: {_name(now)} outputs, {_name(was)} before"


def parameters(
    anatomy: Anatomy, tensors: Sequence[Tensor | None], optimizers: Optimizers
) -> list[Parameter]:
    """Every parameter with the number of its optimizer group, then their parts."""
    groups: dict[int, int] = {}
    for i, group in enumerate(optimizers.groups()):
        groups |= {id(parameter): i for parameter in group["params"]}
    described = [
        replace(
            parameter,
            group=groups.get(id(tensor), -1),
            shape=parameter.shape if tensor is None else tuple(tensor.shape),  # lazy until now
            numel=parameter.numel if tensor is None else tensor.numel(),
        )
        for parameter, tensor in zip(anatomy.parameters, tensors, strict=True)
    ]
    return [*described, *parts_of(described, anatomy.layouts)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
