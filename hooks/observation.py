"""How a live module is watched: forward hooks, tensor hooks, and one operator for torch.compile.

A hook never replaces an output, never keeps a tensor and never waits for the device. In eager
mode it reduces the tensor at once. Under ``torch.compile`` it leaves one call of
``dynscope::observe`` in the graph, which finds its observer by number: the operator takes no
tally, so nothing in the graph is mutated, and ``where`` is a tensor, so nothing is guarded on.

Module full backward hooks are never used: they break in-place code. Gradients of outputs come
through tensor hooks.
"""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.utils.rnn import PackedSequence

from dynscope.hooks.custom import OwnMetrics
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
    dtypes: list[torch.dtype] = field(default_factory=list)  # of its outputs, as they first came
    speechless: bool = False  # called, with no floating tensor in its output
    counted: bool = False  # in this step, by a forward that was no recomputation
    expects_gradient: bool = False
    quiet: bool = False


class Switch:
    """Whether hooks observe: the one thing that a compiled graph is guarded on."""

    def __init__(self) -> None:
        self.armed = False


class Pass(threading.local):
    """The forward that this thread is in: its outermost module, and the grad mode there.

    ``observing``: this thread is in `Observer.observe`, perhaps in a metric of the user's own, and
    whatever that one calls is not the training's.
    """

    module: nn.Module | None = None
    training: bool | None = None
    observing: bool = False


class Observer:
    """Owns the rows and what one recorded step adds to them."""

    def __init__(
        self,
        rows: list[Row],
        tally: Tally,
        measure: Measure,
        own: OwnMetrics,
        on_failure: Callable[[str, str], None],
        *,
        backward: bool = True,
    ) -> None:
        self.rows, self.tally, self.measure = rows, tally, measure
        self.switch = Switch()
        self.backward = backward
        self.order: list[int] = []  # rows in the order of their first call
        self.cost = 0.0  # seconds spent since the last drain
        self.current = Pass()
        self.retyped: list[int] = []  # rows whose output came in another dtype than before
        self.started = False  # a forward has begun since the last optimizer step
        self._own = own
        self._on_failure = on_failure
        self._last: tuple[weakref.ref[Tensor], int, int, str, Observed] | None = None
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
        if torch._C._get_tracing_state() is not None:
            return False  # torch.jit.trace would take what is done here for the model's work
        training = self.current.training
        return torch.is_grad_enabled() if training is None else training

    def observe(
        self,
        row: int,
        mode: int,
        x: Tensor,
        reference: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> None:
        """Reduce ``x`` into ``row``; never raises. ``seen`` is the tensor before detaching."""
        if self.current.observing:
            return
        started = time.perf_counter()
        place = self.rows[row]
        self.current.observing = True
        try:
            if self._counts(place, mode) and not place.quiet and _observable(x):
                with torch.no_grad(), _one_at_a_time:
                    self._reduce(row, mode, _local(x), reference, seen)
        except Exception as error:
            self.fail(row, error)
        finally:
            self.current.observing = False
        self.cost += time.perf_counter() - started

    def _counts(self, place: Row, mode: int) -> bool:
        """Whether this is not a forward that was counted before.

        A forward inside a backward is a recomputation. It is the first that is seen of a part of
        the model under reentrant checkpointing that is called by itself: with grad mode off, as
        in an evaluation.
        """
        if mode != BACKWARD and torch._C._current_graph_task_id() == -1:
            place.counted = True
        elif mode != BACKWARD and place.counted:
            return False
        return self.switch.armed

    def fail(self, row: int, error: Exception) -> None:
        """The row goes quiet and the run goes on."""
        place = self.rows[row]
        if not place.quiet:
            place.quiet = True
            self._on_failure(place.path, f"{type(error).__name__}: {error}")

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
        observed = self._again(seen, mode, place.layout) if reference is None else None
        if observed is None:
            if mode == BACKWARD:
                observed = self.measure.gradient(x)
            else:
                on_host = self.tally.on_host is not None
                observed = self.measure.output(
                    x, _comparable(x, reference), place.layout, on_host=on_host
                )
            if seen is not None:
                self._last = weakref.ref(seen), _version(seen), mode, place.layout, observed
        observed.add_to(self.tally, row)
        if mode == FORWARD:
            self.started = True
            if x.dtype not in place.dtypes:
                (self.retyped if place.dtypes else self.order).append(row)
                place.dtypes.append(x.dtype)
        group = "activation_gradient" if mode == BACKWARD else "activation"
        self._own.add(group, self.tally, row, place.path, x)

    def _again(self, seen: Tensor | None, mode: int, layout: str) -> Observed | None:
        """What was measured a moment ago, if it was this very tensor (an FFN and its last layer)."""
        if seen is None or self._last is None:
            return None
        last, *state, observed = self._last
        if last() is seen and state == [_version(seen), mode, layout]:
            return observed.unpaired()
        return None

    def forget(self) -> None:
        """Start a step with nothing observed."""
        self._last = None
        self.cost = 0.0
        for row in self.rows:
            row.counted = False
        self.current.module = self.current.training = None


# The fused reduction keeps its sums in one place, and threads may train side by side. A metric of
# the user's own may call a model that another recorder watches, hence the R.
_one_at_a_time = threading.RLock()


def _observable(x: Tensor) -> bool:
    return not (
        torch._C._functorch.is_functorch_wrapped_tensor(x)
        or x.is_quantized
        or x.is_meta
        or x.is_sparse
        or isinstance(x, FakeTensor)
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _local(x: Tensor) -> Tensor:
    """The part of a distributed tensor that this rank holds; of a nested one what is no padding."""
    if x.is_nested:
        return x.values()
    return x.to_local() if hasattr(x, "to_local") else x


def _version(x: Tensor) -> int:
    """Changes when ``x`` is written to; tensors made in inference mode do not keep count."""
    return -1 if x.is_inference() else x._version


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
            children = [getattr(value, each.name, None) for each in fields(value)]
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
        return returned, (_inert,)


def returned(value: Any) -> Any:
    """Return ``value``: what unpickling makes of our hooks and recorders."""
    return value


class SiteHook(_Hook):
    """Forward hook of a site: ``(module, args, output)``, with keyword arguments where paired."""

    def __init__(self, observer: Observer, row: int) -> None:
        self.switch, self.where = observer.switch, observer.where(row)
        place = observer.rows[row]
        self.paired = place.paired
        self.backward = observer.backward and place.kind == "site"
        self._observer, self._row = observer, row
        self.versions: dict[int, int] = {}  # of each input when the module was entered, by id

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if not self.switch.armed:
            return
        if torch.compiler.is_compiling():
            self._trace(args, *rest)
        elif self._observer.training_pass():
            try:
                self._eager(args, *rest)
            except Exception as error:
                self._observer.fail(self._row, error)

    def _eager(self, args: Any, *rest: Any) -> None:
        observer, row = self._observer, self._row
        output = primary(rest[-1])
        if output is None:
            observer.rows[row].speechless = True
        if output is None or not _observable(output):
            return
        reference = self._reference(args, *rest)
        if reference is not None and self.versions.get(id(reference), -1) not in (
            -1, _version(reference),
        ):  # fmt: skip
            reference = None  # overwritten in place since the module was entered
        observer.observe(
            row, FORWARD, output.detach(),
            reference.detach() if reference is not None else None, seen=output,
        )  # fmt: skip
        # Reentrant checkpointing sends gradients through the recomputed output only.
        if self.backward and output.requires_grad:
            observer.rows[row].expects_gradient = True
            output.register_hook(GradientHook(observer, row))

    def _trace(self, args: Any, *rest: Any) -> None:
        output = primary(rest[-1])
        if output is None or not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return
        reference = self._reference(args, *rest)
        observe, where = torch.ops.dynscope.observe, self.where
        observe(
            output.detach(), reference.detach() if reference is not None else None, where, FORWARD
        )
        if self.backward and output.requires_grad:
            output.register_hook(lambda g: observe(g.detach(), None, where, BACKWARD))

    def _reference(self, args: Any, *rest: Any) -> Tensor | None:
        """What the output is compared with: the first input of its shape (masks may come first)."""
        output = primary(rest[-1]) if self.paired else None
        if output is None:
            return None
        return next((x for x in _floating((args, rest[0])) if x.shape == output.shape), None)


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
        if torch.compiler.is_compiling():
            x = primary((args, kwargs))
            if x is not None and torch.is_grad_enabled() and not torch.compiler.is_exporting():
                torch.ops.dynscope.observe(x.detach(), None, self.where, INPUT)
        elif self._observer.training_pass():
            try:
                x = primary((args, kwargs))
                if x is not None:
                    self._observer.observe(self._row, INPUT, x.detach())
            except Exception as error:
                self._observer.fail(self._row, error)


class VersionHook(_Hook):
    """Forward pre-hook of a block: notes the versions of its inputs, to see them overwritten."""

    def __init__(self, hook: SiteHook) -> None:
        self.switch, self._hook = hook.switch, hook

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.switch.armed or torch.compiler.is_compiling():
            return
        try:
            self._hook.versions = {id(x): _version(x) for x in _floating((args, kwargs))}
        except Exception:
            self._hook.versions = {}  # the hook itself will meet the same inputs and tell


class RootHook(_Hook):
    """Pre-hook and hook of a module that may be called from outside: the model or a part of it.

    The outermost of them tells training passes from the others. ``is_model``: nothing is around it.
    """

    def __init__(
        self,
        observer: Observer,
        on_enter: Callable[[bool], None],
        *,
        entering: bool,
        is_model: bool,
    ) -> None:
        self._current, self._on_enter = observer.current, on_enter
        self._entering, self._is_model = entering, is_model

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        current = self._current
        if not self._entering:
            if current.module is module:
                current.module = current.training = None
        elif (current.module is None or self._is_model) and (
            torch._C._current_graph_task_id() == -1
        ):
            current.module, current.training = module, torch.is_grad_enabled()
            self._on_enter(current.training)
