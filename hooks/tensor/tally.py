"""The tally: one buffer on the model's device, into which hooks add and which a step drains."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dynscope.analysis.sums import BINS, MAXIMA, OPTIMIZER, PARAMETER, SUMS
from dynscope.hooks.tensor.fused import Row

Drained = Callable[[], dict[str, np.ndarray]]

_SUM = {name: i for i, name in enumerate(SUMS)}
_MAX = {name: i for i, name in enumerate(MAXIMA)}
_MOST_WAITING = 4096  # of many calls in one step


class Tally:
    """A row per observed place, a row per parameter, a row per optimizer group.

    All of it lies in one tensor, so that a step is drained by one copy to the host. Attributes
    are views into it: ``sums`` (rows, len(SUMS)), ``maxima`` (rows, 2), ``top`` (rows, 3, 4),
    ``histogram`` (rows, 4096) int32, ``parameters``, ``optimizer`` and one view per custom metric
    with the columns value and weight.
    """

    def __init__(
        self,
        rows: int,
        parameters: int,
        groups: int,
        custom: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {
            "sums": (rows, len(SUMS)),
            "maxima": (rows, len(MAXIMA)),
            "top": (rows, 3, 4),
            "parameters": (parameters, len(PARAMETER)),
            "optimizer": (groups, len(OPTIMIZER)),
            "histogram": (rows, BINS // 2),  # two int32 counts in the space of a float64
        } | {f"custom:{name}": (length, 2) for name, length in custom.items()}
        size = sum(int(np.prod(shape)) for shape in self._shapes.values())
        with torch.inference_mode(False):
            self._buffer = torch.zeros(size, dtype=torch.float64, device=device)
        self.device = device
        self._views = self._split(self._buffer)
        self.sums, self.maxima = self._views["sums"], self._views["maxima"]
        self.top, self.histogram = self._views["top"], self._views["histogram"]
        self.parameters, self.optimizer = self._views["parameters"], self._views["optimizer"]
        # On the CPU, scalars are added through numpy: a tenth of the cost of a tensor operation.
        self.on_host = (
            {name: view.numpy() for name, view in self._views.items()}
            if device.type == "cpu"
            else None
        )
        self._waiting: list[tuple[int, Mapping[str, Tensor | float]]] = []
        self._addresses: dict[tuple[int, tuple[int, ...], str], Row] = {}
        self.clear()

    def _split(self, buffer: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for name, shape in self._shapes.items():
            size = int(np.prod(shape))
            part = buffer[start : start + size]
            part = part.view(torch.int32) if name == "histogram" else part
            views[name] = part.view(shape[0], *(shape[1:] if name != "histogram" else (BINS,)))
            start += size
        return views

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._buffer.nbytes

    def custom(self, name: str) -> Tensor:
        """Value and weight of the custom metric ``name``: (rows or parameters, 2)."""
        return self._views[f"custom:{name}"]

    def clear(self) -> None:
        """Back to nothing observed."""
        self._waiting.clear()
        self._buffer.zero_()
        self.top[:, :, 0] = torch.nan

    def clear_row(self, row: int) -> None:
        """Forget what was added to one row."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0] != row]
        for name, view in self._views.items():
            if name not in ("parameters", "optimizer") and not name.startswith("custom:gradient/"):
                view[row] = 0
        self.top[row, :, 0] = torch.nan

    def keep_if(self, keep: Tensor) -> None:
        """Forget what was added unless ``keep`` (0-d bool) holds, without waiting for it."""
        self._add_waiting()
        empty = torch.zeros((), dtype=torch.float64, device=self.device)
        torch.where(keep, self._buffer, empty, out=self._buffer)
        self.top[:, :, 0] = torch.where(keep, self.top[:, :, 0], torch.nan)

    def unscale(self, scale: Tensor) -> None:
        """Take a loss scale out of the gradients of outputs."""
        self._add_waiting()
        scale = scale.to(self.device, torch.float64, non_blocking=True)
        self.sums[:, _SUM["gradient_squares"]] /= scale**2
        self.maxima[:, _MAX["gradient_absmax"]] /= scale

    def add(self, row: int, values: Mapping[str, Tensor | float]) -> None:
        """Add named sums to ``row`` and raise its named maxima (a NaN stays)."""
        if self.on_host is not None:
            self._waiting.append((row, values))
            if len(self._waiting) >= _MOST_WAITING:
                self._add_waiting()
            return
        self.sums[row] += self._vector(values, SUMS)
        torch.maximum(self.maxima[row], self._vector(values, MAXIMA), out=self.maxima[row])

    def _add_waiting(self) -> None:
        """Add up what waits. Between two large matrix products, where a hook runs, nothing of ours
        is in the cache and each of these operations would take many times as long.
        """
        if self.on_host is None or not self._waiting:
            return
        sums, maxima = self.on_host["sums"], self.on_host["maxima"]
        with np.errstate(invalid="ignore"):  # infinities of both signs make a NaN, and may
            for row, values in self._waiting:
                for name, value in values.items():
                    if name in _SUM:
                        sums[row, _SUM[name]] += float(value)
                    else:
                        cell = maxima[row, _MAX[name] :][:1]
                        np.maximum(cell, float(value), out=cell)
        self._waiting.clear()

    def _vector(self, values: Mapping[str, Tensor | float], names: Sequence[str]) -> Tensor:
        """The named values in order, 0 where absent, without a copy from the host."""
        where = next((v.device for v in values.values() if isinstance(v, Tensor)), self.device)
        cells = [
            value.double()
            if isinstance(value := values.get(name, 0.0), Tensor)
            else torch.full((), value, dtype=torch.float64, device=where)
            for name in names
        ]
        return torch.stack(cells).to(self.device, non_blocking=True)

    def add_top(self, row: int, found: Tensor) -> None:
        """Merge three more elements (3, 4: value, channel, token, batch) into the top three.

        Missing ones have a NaN value.
        """
        six = torch.cat([self.top[row], found])
        size = six[:, 0].abs().nan_to_num(nan=-1.0)
        self.top[row] = six[size.argsort(descending=True, stable=True)[:3]]

    def single(self) -> "Tally":
        """An empty tally of one row, on the same device."""
        return Tally(1, 0, 0, {}, self.device)

    def take_in(self, row: int, other: "Tally", places: Callable[[Tensor], Tensor]) -> None:
        """Merge the only row of ``other``, of which ``places`` corrects the largest elements."""
        other._add_waiting()
        self.sums[row] += other.sums[0]
        torch.maximum(self.maxima[row], other.maxima[0], out=self.maxima[row])
        self.histogram[row] += other.histogram[0]
        self.add_top(row, places(other.top[0]))

    def address(self, row: int, shape: tuple[int, ...], layout: str) -> Row:
        """A row in memory, for the fused reduction to add to."""
        known = self._addresses.get((row, shape, layout))
        if known is None:
            known = Row(
                self.sums[row].data_ptr(),
                self.maxima[row].data_ptr(),
                self.top[row].data_ptr(),
                self.histogram[row].data_ptr(),
                *zip(*axes(shape, layout), strict=True),
            )
            self._addresses[row, shape, layout] = known
        return known

    def drain(self) -> Drained:
        """Empty the tally; calling the result gives what it held, as host arrays.

        One copy to the host, which on an accelerator nobody waits for before the call.
        """
        self._add_waiting()
        if self.device.type == "cuda":
            host = torch.empty_like(self._buffer, device="cpu", pin_memory=True)
            host.copy_(self._buffer, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        else:
            host, done = self._buffer.to("cpu", copy=True), None
        self.clear()

        def arrays() -> dict[str, np.ndarray]:
            if done is not None:
                done.synchronize()
            return {name: view.numpy() for name, view in self._split(host).items()}

        return arrays


@lru_cache(maxsize=1024)
def axes(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, int], ...]:
    """Stride and length of the channel, token and batch axes; length 0 where there is none.

    ``layout`` names the axes: "btc" (the last axis holds channels, the one before it tokens, those
    before that the batch), "tbc" (tokens first) or "bct" (channels at axis 1, as in images, with
    the flattened remaining axes as positions). Two axes are batch and channels.
    """
    none, total = (1, 0), math.prod(shape)
    if len(shape) < 2:
        return (1, total), none, none
    if layout == "bct" and len(shape) > 2:
        inner = math.prod(shape[2:])
        return (inner, shape[1]), (1, inner), (inner * shape[1], shape[0])
    channels, outer = shape[-1], total // max(1, shape[-1])
    if len(shape) == 2:
        return (1, channels), none, (channels, outer)
    if layout == "tbc":
        batch = shape[1]
        return (1, channels), (channels * batch, outer // max(1, batch)), (channels, batch)
    tokens = shape[-2]
    return (1, channels), (channels, tokens), (channels * tokens, outer // max(1, tokens))


def locate(index: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    """Channel, token and batch (n, 3) of flat indices (n) into ``shape``; -1 for a missing axis."""
    none = torch.full_like(index, -1)
    places = [
        index // stride % length if length else none for stride, length in axes(shape, layout)
    ]
    return torch.stack(places, 1)
