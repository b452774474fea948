"""Gradients and updates of the parameters, read around the optimizer's step."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dynscope.analysis.sums import PARAMETER
from dynscope.hooks.model.anatomy import Anatomy
from dynscope.hooks.telling.telling import Telling, named
from dynscope.hooks.tensor.custom import OwnMetrics
from dynscope.hooks.tensor.measure import Measure
from dynscope.hooks.tensor.private import ScriptModule, differences, norms
from dynscope.hooks.tensor.reduce import sparse_stride
from dynscope.hooks.tensor.tally import Tally
from dynscope.hooks.tensor.tensors import local
from dynscope.hooks.training.optimizer import held
from dynscope.hooks.training.unclipped import Given, Reading, Squares, Unclipped

UPDATE_SAMPLE = 2**14
"""Elements of a parameter whose change is followed: 0.6 % standard error of a Gaussian update's
norm, within the 256 KiB allowed per parameter."""

LINE = 16
"""Neighbours taken together: what is read from memory at once anyway."""

_COLUMN = {name: i for i, name in enumerate(PARAMETER)}


class _Sample(NamedTuple):
    """Weights before a step: the parameter, its address, a view of the sampled ones, a copy."""

    parameter: Tensor
    address: int
    sample: Tensor
    kept: Tensor

    def lives_in(self, parameter: Tensor) -> bool:
        """Whether the view still shows the weights of ``parameter``."""
        same = parameter is self.parameter and parameter.data_ptr() == self.address
        return same and parameter.is_contiguous()


class ParameterWatch:
    """Reads every parameter once, however often it is shared, by looking it up at step time.

    A parameter that was replaced after attaching is therefore still followed. Nothing here calls
    a clipping function or writes to a gradient.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        measure: Measure,
        own: OwnMetrics,
        telling: Telling,
        *,
        light: bool,
        full: bool,
    ) -> None:
        self._measure, self._own, self._telling = measure, own, telling
        self._light, self._full = light, full
        self.names = [parameter.name for parameter in anatomy.parameters]
        self._owners = [_owner(anatomy, name) for name in self.names]
        self._tensors = [anatomy.tensors[name] for name in self.names]
        self._quiet: set[int] = set()
        self._before: dict[int, _Sample] = {}
        self._unclipped = Unclipped()
        self._places: dict[int, int] | None = None  # rows by the identity of their parameter

    def numel(self) -> np.ndarray:
        """Numbers in each parameter, two to a complex element; 0 where it has none yet."""
        return np.array(
            [
                0 if p is None or is_lazy(p) else p.numel() * (1 + p.is_complex())
                for p in self.current()
            ]
        )

    def current(self) -> list[Tensor | None]:
        """The parameters as they are now; None where one was removed."""
        return [self._now(i) for i in range(len(self.names))]

    def gradients(self) -> list[Tensor | None]:
        """What lies in every parameter's ``grad`` now."""
        return [None if p is None or is_lazy(p) else p.grad for p in self.current()]

    def renew(self) -> None:
        """A forward begins or a backward is over: gradients are added to, parameters may be others."""
        self._unclipped.renew()
        self._places = None

    @torch.no_grad()
    def read_gradients(
        self,
        tally: Tally,
        scale: Tensor | float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """What the optimizer is about to apply; ``scale`` is a loss scale still in the gradients.

        Of all parameters, or of those that ``optimizer`` holds.
        """

        def read(i: int, parameter: Tensor) -> None:
            gradient = _dense(parameter.grad)
            if gradient is None:
                return
            seen = _scaled(self._measure.squares_of(gradient), scale)
            count = local(parameter).numel()
            _write(tally, i, ("squares", "nonfinite", "absmax", "count"), (*seen, count))
            true = gradient if scale is None else gradient / scale
            self._own.put("gradient", tally, i, self.names[i], true)

        self._each(read, self._rows(optimizer))

    @torch.no_grad()
    def read_before_clip(
        self, scaler: Any | None, *, scaled: bool, given: Given | None = None
    ) -> None:
        """The gradients before they are clipped: those ``given``, or of all parameters.

        ``scaled``: whether the loss scale of ``scaler`` is still in them.
        """
        wanted = None if given is None else {id(gradient) for gradient in given}

        def read(i: int, parameter: Tensor) -> None:
            if wanted is not None and id(parameter.grad) not in wanted:
                return
            gradient = _dense(parameter.grad)
            if gradient is not None and self._unclipped.due(i):
                squares = self._measure.squares_of(gradient)
                self._unclipped.keep(i, Reading(squares, scaled, scaler))

        self._each(read)

    @torch.no_grad()
    def write_before_clip(
        self,
        tally: Tally,
        scaler: Any | None,
        scale: Tensor | None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> str:
        """What was clipped in this step, and beside it what was not: that is what is applied.

        ``scaler`` and its ``scale`` are those of the step. Returns why nothing is known, if so.
        """
        for i, reading in self._unclipped.take(list(self._rows(optimizer))):
            if reading is None:
                _copy(tally, i, ("squares", "count"), ("before_clip", "before_clip_seen"))
                continue
            if reading.scaler is not scaler and scale is not None:
                return (
                    "which gradient scaler they were scaled by was not known when they were clipped"
                )
            squares = _scaled(reading.squares, scale if reading.scaled else None)[0]
            _write(tally, i, ("before_clip", "before_clip_seen"), (squares, 1.0))
        return ""

    def finish(self) -> None:
        """The step has been taken."""
        self._unclipped.finish()
        self._places = None

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Keep a sample of the weights, or in the full bundle all of them.

        Of those that ``optimizer`` holds: what another one changes is not this one's update.
        """
        self._before.clear()
        if self._light:
            return

        def keep(i: int, parameter: Tensor) -> None:
            sample = self._sample(parameter)
            self._before[i] = _Sample(parameter, parameter.data_ptr(), sample, sample.clone())

        self._each(keep, self._rows(optimizer))

    @torch.no_grad()
    def after_step(self, tally: Tally) -> None:
        """What the step changed on the sample."""
        found: list[int] = []
        weights: list[Tensor] = []
        now: list[Tensor] = []

        def read(i: int, parameter: Tensor) -> None:
            before = self._before.get(i)
            if before is None:
                return
            after = before.sample if before.lives_in(parameter) else self._sample(parameter)
            kept = before.kept
            if (kept.shape, kept.device) == (after.shape, after.device):
                found.append(i)
                weights.append(_wide(kept))
                now.append(_wide(after))

        self._each(read, list(self._before))
        self._before.clear()
        if not found:
            return
        # All parameters in a few calls: one by one this would cost more than reading them.
        dtype = torch.float64 if self._full else None  # float32 is enough for a sample
        moved = norms(differences(now, weights), dtype)
        sizes = norms(weights, dtype)
        squares = torch.stack([x.to(tally.device) for x in (*moved, *sizes)]).double().square()
        each = squares.tolist() if tally.on_host is not None else squares.unbind()
        names = ("update_squares", "weight_squares", "update_seen")
        for k, i in enumerate(found):
            _write(tally, i, names, (each[k], each[k + len(found)], float(weights[k].numel())))

    def _sample(self, parameter: Tensor) -> Tensor:
        flat = _real(local(parameter.detach())).flatten()
        if self._full or flat.numel() <= UPDATE_SAMPLE:
            return flat
        lines = flat[: flat.numel() // LINE * LINE].view(-1, LINE)
        axes = (len(lines), *parameter.shape)
        return lines[:: sparse_stride(len(lines), axes, UPDATE_SAMPLE // LINE)]

    def _rows(self, optimizer: torch.optim.Optimizer | None) -> Collection[int]:
        """The rows of the parameters that ``optimizer`` holds, of None all.

        Many optimizers of one parameter each must not look through all parameters each.
        """
        if optimizer is None:
            return range(len(self.names))
        if self._places is None:
            self._places = {id(p): i for i, p in enumerate(self.current()) if p is not None}
        return sorted(self._places[each] for each in held(optimizer) if each in self._places)

    def _now(self, i: int) -> Tensor | None:
        owner, attribute = self._owners[i]
        return self._tensors[i] if owner is None else owner._parameters.get(attribute)

    def _each(
        self, read: Callable[[int, Tensor], None], rows: Collection[int] | None = None
    ) -> None:
        for i in range(len(self.names)) if rows is None else rows:
            parameter = self._now(i)
            if i in self._quiet or parameter is None or not parameter.requires_grad:
                continue
            if is_lazy(parameter) or parameter.is_meta or parameter.numel() == 0:
                continue
            try:
                read(i, parameter)
            except Exception as error:
                self._quiet.add(i)
                self._telling.failed(self.names[i], named(error))


def _owner(anatomy: Anatomy, name: str) -> tuple[nn.Module | None, str]:
    """The module that holds the parameter and its name there; None inside wrappers."""
    prefix, _, attribute = name.rpartition(".")
    module = anatomy.modules.get(prefix)
    if module is None or isinstance(module, ScriptModule):
        return None, attribute
    held = module._parameters.get(attribute) is anatomy.tensors[name]
    return (module if held else None), attribute


def _scaled(seen: Squares, scale: Tensor | float | None) -> Squares:
    squares, nonfinite, absmax = seen
    if scale is not None:
        squares, absmax = squares / scale**2, absmax / scale
    return squares, nonfinite, absmax


def _wide(x: Tensor) -> Tensor:
    """At least float32, in which nearby weights of a narrower type differ exactly."""
    return x if x.dtype == torch.float64 else x.float()


def _dense(gradient: Tensor | None) -> Tensor | None:
    """The numbers of a gradient: repeated rows of a sparse one are added up first."""
    if gradient is None:
        return None
    gradient = local(gradient.detach())
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return _real(gradient) if gradient.numel() else None


def _real(x: Tensor) -> Tensor:
    """The parts of complex numbers as numbers: their squares add up to the same."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _write(tally: Tally, row: int, names: Sequence[str], values: Sequence[Tensor | float]) -> None:
    if tally.on_host is not None:
        for name, value in zip(names, values, strict=True):
            tally.on_host["parameters"][row, _COLUMN[name]] = float(value)
        return
    for name, value in zip(names, values, strict=True):
        tally.parameters[row, _COLUMN[name]] = value


def _copy(tally: Tally, row: int, names: Sequence[str], to: Sequence[str]) -> None:
    cells = tally.parameters if tally.on_host is None else tally.on_host["parameters"]
    for name, other in zip(names, to, strict=True):
        cells[row, _COLUMN[other]] = cells[row, _COLUMN[name]]
