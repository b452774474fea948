"""How a live module is watched: forward hooks, tensor hooks, and one operator for torch.compile.

A hook never replaces an output, never keeps a tensor and never waits for the device. In eager
mode it reduces the tensor at once. Under ``torch.compile`` it leaves one call of
``dynscope::observe`` in the graph, which finds its observer by number: the operator takes no
tally, so nothing in the graph is mutated, and ``where`` is a tensor, so nothing is guarded on.

Module full backward hooks are never used: they break in-place code. Gradients of outputs come
through tensor hooks.
"""

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dynscope.hooks.custom import SiteMetric
from dynscope.hooks.measure import Measure, Observed
from dynscope.hooks.tally import Tally

FORWARD, BACKWARD, INPUT = 0, 1, 2

_observers: "weakref.WeakValueDictionary[int, Observer]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


@torch.library.custom_op("dynscope::observe", mutates_args=())
def _observe(x: Tensor, reference: Tensor | None, where: Tensor, mode: int) -> None:
    number, row = where.tolist()
    observer = _observers.get(number)
    if observer is not None:
        observer.observe(row, mode, x, reference)


@_observe.register_fake
def _(x: Tensor, reference: Tensor | None, where: Tensor, mode: int) -> None:
    return None


# Without an output nothing depends on the operator: say that it is not dead code.
torch.fx.node.has_side_effect(torch.ops.dynscope.observe.default)


Kind = Literal["site", "size", "input"]


@dataclass
class Row:
    """A row of the tally: a site, or a place of which only the size of its output or input is
    taken because a site's branch_ratio needs it.
    """

    path: str
    layout: str = "btc"
    kind: Kind = "site"
    paired: bool = False  # the angle to the module's own input is measured
    dtype: str = ""
    expects_gradient: bool = False
    quiet: bool = False


class Switch:
    """Whether hooks observe: the one thing that a compiled graph is guarded on."""

    def __init__(self) -> None:
        self.armed = False


class Observer:
    """Owns the rows and what one recorded step adds to them."""

    def __init__(
        self,
        rows: list[Row],
        tally: Tally,
        measure: Measure,
        custom: tuple[SiteMetric, ...],
        on_failure: Callable[[str, str], None],
        *,
        backward: bool = True,
    ) -> None:
        self.rows, self.tally, self.measure = rows, tally, measure
        self.switch = Switch()
        self.backward = backward
        self.order: list[int] = []  # rows in the order of their first call
        self.cost = 0.0  # seconds spent since the last drain
        self.inside: bool | None = None  # grad mode in which the root's forward was entered
        self.started = False  # a forward has begun since the last optimizer step
        self._custom = custom
        self._on_failure = on_failure
        self._last: tuple[weakref.ref[Tensor], int, int, Observed] | None = None
        self.number = next(_numbers)
        _observers[self.number] = self

    def where(self, row: int) -> Tensor:
        """The operator's address of ``row``: CPU int64 [observer, row]."""
        return torch.tensor([self.number, row], dtype=torch.int64, device="cpu")

    def training_pass(self) -> bool:
        """Whether the running forward is one of training.

        ``module.training`` does not tell. What tells is the grad mode in which the model was
        entered: the first pass of reentrant checkpointing runs with it off inside such a forward.
        """
        return torch.is_grad_enabled() if self.inside is None else self.inside

    def observe(
        self,
        row: int,
        mode: int,
        x: Tensor,
        reference: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> None:
        """Reduce ``x`` into ``row``; never raises. ``seen`` is the tensor before detaching."""
        started = time.perf_counter()
        place = self.rows[row]
        try:
            # A forward inside a backward is a recomputation: it was counted the first time.
            first = mode == BACKWARD or torch._C._current_graph_task_id() == -1
            if first and not place.quiet and self.switch.armed and _observable(x):
                with torch.no_grad():
                    self._reduce(row, mode, _local(x), reference, seen)
        except Exception as error:
            place.quiet = True
            self._on_failure(place.path, f"{type(error).__name__}: {error}")
        self.cost += time.perf_counter() - started

    def _reduce(
        self, row: int, mode: int, x: Tensor, reference: Tensor | None, seen: Tensor | None
    ) -> None:
        place = self.rows[row]
        if mode == INPUT:
            self.measure.input(x).add_to(self.tally, row)
            return
        if place.kind == "size":
            self.measure.size(x).add_to(self.tally, row)
            return
        observed = self._again(seen, mode) if reference is None else None
        if observed is None:
            if mode == BACKWARD:
                observed = self.measure.gradient(x)
            else:
                observed = self.measure.output(x, _comparable(x, reference), place.layout)
            if seen is not None:
                self._last = weakref.ref(seen), seen._version, mode, observed
        observed.add_to(self.tally, row)
        if mode == FORWARD and not place.dtype:
            place.dtype = str(x.dtype).removeprefix("torch.")
            self.order.append(row)
        group = "activation_gradient" if mode == BACKWARD else "activation"
        for metric in self._custom:
            if metric.group == group:
                metric.add(self.tally, row, x)

    def _again(self, seen: Tensor | None, mode: int) -> Observed | None:
        """What was measured a moment ago, if it was this very tensor (an FFN and its last layer)."""
        if seen is None or self._last is None:
            return None
        last, version, last_mode, observed = self._last
        if last() is seen and version == seen._version and mode == last_mode:
            values = {k: v for k, v in observed.values.items() if k not in _PAIRED}
            return Observed(values, observed.histogram, observed.top)
        return None

    def forget(self) -> None:
        """Start a step with nothing observed."""
        self._last = None
        self.cost = 0.0


_PAIRED = frozenset({"tokens", "angle", "cosine", "input_squares", "input_count"})


def _observable(x: Tensor) -> bool:
    return not (
        torch._C._functorch.is_functorch_wrapped_tensor(x)
        or x.is_quantized
        or x.is_meta
        or x.is_sparse
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _local(x: Tensor) -> Tensor:
    """The part of a distributed tensor that this rank holds."""
    return x.to_local() if hasattr(x, "to_local") else x


def _comparable(x: Tensor, reference: Tensor | None) -> Tensor | None:
    """The block's input, unless it has another shape or was overwritten by the output."""
    if reference is None or reference.shape != x.shape or reference.data_ptr() == x.data_ptr():
        return None
    return _local(reference)


def _floating(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif depth < 4:
        if isinstance(value, Mapping):
            children = list(value.values())
        elif isinstance(value, (tuple, list)):
            children = list(value)
        elif is_dataclass(value) and not isinstance(value, type):
            children = [getattr(value, field.name) for field in fields(value)]
        else:
            return
        for child in children:
            yield from _floating(child, depth + 1)


def primary(value: Any) -> Tensor | None:
    """The tensor that stands for a module's output: the first floating one, in order.

    Tuples, lists, mappings, dataclasses and packed sequences are walked in the order of their
    items; integer tensors, None and caches are passed over.
    """
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    return next(_floating(value), None)


def _inert(*_: Any) -> None:
    """What becomes of our hooks in a copy of the model: it does not record."""


class _Hook:
    """A hook that becomes inert when its module is copied or pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return operator_return, (_inert,)


def operator_return(value: Any) -> Any:
    """Return ``value``: what unpickles our hooks into inert ones."""
    return value


class SiteHook(_Hook):
    """Forward hook of a site: ``(module, args, output)``, with keyword arguments where paired."""

    def __init__(self, observer: Observer, row: int) -> None:
        self.switch, self.where = observer.switch, observer.where(row)
        place = observer.rows[row]
        self.paired = place.paired
        self.backward = observer.backward and place.kind == "site"
        self._observer, self._row = observer, row
        self.version = -1  # of the input when the module was entered

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if not self.switch.armed:
            return
        output = primary(rest[-1])
        if output is None:
            return
        reference = primary((args, rest[0])) if self.paired else None
        if torch.compiler.is_compiling():
            self._trace(output, reference)
        elif self._observer.training_pass():
            self._eager(output, reference)

    def _eager(self, output: Tensor, reference: Tensor | None) -> None:
        observer, row = self._observer, self._row
        if reference is not None and self.version not in (-1, reference._version):
            reference = None  # overwritten in place since the module was entered
        observer.observe(
            row, FORWARD, output.detach(),
            reference.detach() if reference is not None else None, seen=output,
        )  # fmt: skip
        # Reentrant checkpointing sends gradients through the recomputed output only.
        if self.backward and output.requires_grad:
            observer.rows[row].expects_gradient = True
            output.register_hook(GradientHook(observer, row))

    def _trace(self, output: Tensor, reference: Tensor | None) -> None:
        if not torch.is_grad_enabled():
            return
        observe, where = torch.ops.dynscope.observe, self.where
        observe(
            output.detach(), reference.detach() if reference is not None else None, where, FORWARD
        )
        if self.backward and output.requires_grad:
            output.register_hook(lambda g: observe(g.detach(), None, where, BACKWARD))


class GradientHook:
    """Tensor hook on a site's output."""

    def __init__(self, observer: Observer, row: int) -> None:
        self._observer, self._row = observer, row

    def __call__(self, gradient: Tensor) -> None:
        if self._observer.switch.armed:
            self._observer.observe(self._row, BACKWARD, gradient.detach(), seen=gradient)


class InputHook(_Hook):
    """Forward pre-hook where a module's input is the residual stream of a sublayer."""

    def __init__(self, observer: Observer, row: int) -> None:
        self.switch, self.where = observer.switch, observer.where(row)
        self._observer, self._row = observer, row

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.switch.armed:
            return
        x = primary((args, kwargs))
        if x is None:
            return
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                torch.ops.dynscope.observe(x.detach(), None, self.where, INPUT)
        elif self._observer.training_pass():
            self._observer.observe(self._row, INPUT, x.detach())


class VersionHook(_Hook):
    """Forward pre-hook of a block: notes the version of its input, to see it overwritten."""

    def __init__(self, hook: SiteHook) -> None:
        self.switch, self._hook = hook.switch, hook

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.switch.armed or torch.compiler.is_compiling():
            return
        x = primary((args, kwargs))
        self._hook.version = x._version if x is not None and not x.is_inference() else -1


class RootHook(_Hook):
    """Pre-hook and hook of the whole model: tells training passes from the others."""

    def __init__(self, observer: Observer, entering: bool, on_enter: Callable[[], None]) -> None:
        self._observer, self._entering, self._on_enter = observer, entering, on_enter

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._entering and torch._C._current_graph_task_id() == -1:
            training = torch.is_grad_enabled()
            self._observer.inside = training
            if training:
                self._on_enter()
        elif not self._entering:
            self._observer.inside = None
