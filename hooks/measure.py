"""What one tensor adds to the tally: by the fused reduction where it is there, else by its twin."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dynscope.hooks import reduce
from dynscope.hooks.fused import FIELDS, Compilation, Library
from dynscope.hooks.tally import Tally, locate


@dataclass(frozen=True)
class Observed:
    """Sums and maxima by name, and for outputs the histogram (4096) and the top three (3, 4)."""

    values: Mapping[str, Tensor | float] = field(default_factory=dict)
    histogram: Tensor | np.ndarray | None = None
    top: Tensor | np.ndarray | None = None

    def add_to(self, tally: Tally, row: int) -> None:
        tally.add(row, self.values)
        if self.histogram is not None:
            tally.add_histogram(row, self.histogram)
        if self.top is not None:
            tally.add_top(row, self.top)


class Measure:
    """Reduces tensors; ``light`` and ``full`` are the bundles' more or less."""

    def __init__(
        self, compilation: Compilation, *, light: bool = False, full: bool = False
    ) -> None:
        self._compilation = compilation
        self._light, self._full = light, full

    def _library(self, x: Tensor) -> Library | None:
        library = self._compilation.library
        if library is None or x.device.type != "cpu" or x.dtype not in library.dtypes:
            return None
        return library

    def output(self, x: Tensor, reference: Tensor | None, layout: str) -> Observed:
        """Of a site's output ``x``; ``reference`` is the block's input, of the same shape."""
        n = float(x.numel())
        calls: dict[str, Tensor | float] = {"calls": 1.0, "count": n}
        if n == 0:
            return Observed(calls)
        if self._light:
            _, nonfinite, absmax = self.squares_of(x)
            return Observed(calls | {"nonfinite": nonfinite, "absmax": absmax})
        x = x.contiguous()
        if reference is not None:
            calls["input_count"] = n
            reference = reference.contiguous()
            if reference.dtype != x.dtype:
                x, reference = x.float(), reference.float()
        library = self._library(x)
        observed = (
            _eager(x, reference, layout, calls)
            if library is None
            else _fused(library, x, reference, layout, calls)
        )
        if self._full:
            rows = x.movedim(1, -1) if layout == "bct" and x.dim() > 2 else x
            more = {**observed.values, **reduce.higher_moments(rows)}
            return Observed(more, observed.histogram, observed.top)
        return observed

    def input(self, x: Tensor) -> Observed:
        """Of the residual stream that a sublayer is added to."""
        if x.numel() == 0:
            return Observed()
        return Observed({"input_count": float(x.numel()), "input_squares": self.squares_of(x)[0]})

    def size(self, x: Tensor) -> Observed:
        """Of what a sublayer adds, where that is no site of its own."""
        if x.numel() == 0:
            return Observed()
        return Observed({"calls": 1.0, "count": float(x.numel()), "squares": self.squares_of(x)[0]})

    def gradient(self, g: Tensor) -> Observed:
        """Of the gradient with respect to a site's output."""
        calls = {"gradient_calls": 1.0, "gradient_count": float(g.numel())}
        if g.numel() == 0:
            return Observed(calls)
        total, nonfinite, absmax = self.squares_of(g)
        return Observed(
            calls
            | {
                "gradient_squares": total,
                "gradient_nonfinite": nonfinite,
                "gradient_absmax": absmax,
            }
        )

    def squares_of(self, x: Tensor) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
        """Sum of squares, non-finite count and largest magnitude."""
        x = x.contiguous()
        library = self._library(x)
        if library is not None:
            total, nonfinite, absmax = library.squares(x).tolist()
            return total, nonfinite, absmax
        on_device = reduce.squares(x)
        return on_device[0], on_device[1], on_device[2]


def _fused(
    library: Library,
    x: Tensor,
    reference: Tensor | None,
    layout: str,
    calls: dict[str, Tensor | float],
) -> Observed:
    stride = reduce.sample_stride(tuple(x.shape))
    out, histogram, values, indices = library.observe(x, reference, stride)
    top = np.full((3, 4), np.nan)
    for i, (value, index) in enumerate(zip(values.tolist(), indices.tolist(), strict=True)):
        if index >= 0:
            top[i] = (value, *locate(index, x.shape, layout))
    numbers = dict(zip((*FIELDS, "absmax"), out.tolist(), strict=True))
    return Observed(numbers | calls, histogram, top)


def _eager(
    x: Tensor, reference: Tensor | None, layout: str, calls: dict[str, Tensor | float]
) -> Observed:
    histogram = reduce.histogram(x, reduce.sample_stride(tuple(x.shape)))
    rows = reduce.as_rows(x)
    values = reduce.moments(rows, histogram) | calls
    if reference is not None:
        values |= reduce.angle(x, reference)
    found, index = reduce.top_three(rows, reduce.extent(rows))
    places = torch.stack(locate(index, x.shape, layout), 1).double()
    top = torch.cat([torch.where(index < 0, math.nan, found)[:, None], places], 1)
    return Observed(values, histogram, top)
