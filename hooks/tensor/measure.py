"""What one tensor adds to the tally: by the fused reduction where it is there, else by its twin."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dynscope.errors import DynscopeError
from dynscope.hooks.tensor import reduce
from dynscope.hooks.tensor.fused import Compilation, Library
from dynscope.hooks.tensor.tally import Tally, locate

PAIRED = frozenset({"tokens", "angle", "cosine", "input_squares", "input_count"})


@dataclass(frozen=True)
class Observed:
    """What a tensor adds to a row: sums and maxima by name, and what outputs have besides.

    ``histogram`` (4096) and ``top`` (3, 4) come from PyTorch; with ``library`` set, the fused
    reduction holds all but ``values``, until its next call.
    """

    values: Mapping[str, Tensor | float] = field(default_factory=dict)
    histogram: Tensor | None = None
    top: Tensor | None = None
    library: Library | None = None
    shape: tuple[int, ...] = ()
    layout: str = ""
    serial: int = 0
    paired: bool = True

    def add_to(self, tally: Tally, row: int) -> None:
        if self.library is not None:
            if self.library.serial != self.serial:
                raise DynscopeError("the result of a reduction was overwritten before it was added")
            self.library.add_to(tally.address(row, self.shape, self.layout), self.paired)
        if self.values:
            tally.add(row, self.values)
        if self.histogram is not None:
            tally.histogram[row] += self.histogram
        if self.top is not None:
            tally.add_top(row, self.top)

    def unpaired(self) -> "Observed":
        """The same without what came from the comparison with the block's input."""
        rest = {name: value for name, value in self.values.items() if name not in PAIRED}
        return replace(self, values=rest, paired=False)


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
        if x.data_ptr() == 0:  # a tensor without memory of its own, whatever it is
            return None
        return library

    def output(
        self, x: Tensor, reference: Tensor | None, layout: str, *, on_host: bool = True
    ) -> Observed:
        """Of a site's output ``x``; ``reference`` is the block's input, of the same shape.

        ``on_host`` says where the tally is: the fused reduction adds to host memory only.
        """
        calls: dict[str, Tensor | float] = {"calls": 1.0, "count": float(x.numel())}
        if x.numel() == 0:
            return Observed(calls)
        if self._light:
            _, nonfinite, absmax = self.squares_of(x)
            return Observed(calls | {"nonfinite": nonfinite, "absmax": absmax})
        x = x.contiguous()
        if reference is not None:
            reference = reference.contiguous()
            if reference.dtype != x.dtype:
                x, reference = x.float(), reference.float()
        library, shape = self._library(x), tuple(x.shape)
        if library is None or not on_host:
            observed = _by_torch(x, reference, layout)
        else:
            library.observe(x, reference, reduce.sample_stride(shape))
            observed = Observed(library=library, shape=shape, layout=layout, serial=library.serial)
        if self._full:
            rows = x.movedim(1, -1) if layout == "bct" and x.dim() > 2 else x
            more = {**observed.values, **reduce.higher_moments(rows)}
            return replace(observed, values=more)
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
            return library.squares(x)
        on_device = reduce.squares(x)
        return on_device[0], on_device[1], on_device[2]


def _by_torch(x: Tensor, reference: Tensor | None, layout: str) -> Observed:
    shape, n = tuple(x.shape), float(x.numel())
    histogram, rows = reduce.histogram(x, reduce.sample_stride(shape)), reduce.as_rows(x)
    values = reduce.moments(rows, histogram) | {"calls": 1.0, "count": n}
    if reference is not None:
        values |= reduce.angle(x, reference) | {"input_count": n}
    found, index = reduce.top_three(rows, reduce.extent(rows))
    found = torch.where(index < 0, math.nan, found)
    top = torch.cat([found[:, None], locate(index, shape, layout).double()], 1)
    return Observed(values, histogram, top)
