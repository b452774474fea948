"""What the hooks do with a tensor: an observer, and one operator for torch.compile.

An observation never waits for the device. In eager mode a hook has the tensor reduced at once.
Under ``torch.compile`` it leaves one call of ``dynscope::observe`` in the graph, which finds its
observer by number: the operator takes no tally, so nothing in the graph is mutated, and ``where``
is a tensor, so nothing is guarded on.
"""

import inspect
import itertools
import sys
import threading
import time
import weakref
from functools import lru_cache
from types import CodeType, FrameType

import torch
from torch import Tensor

from dynscope.hooks.telling.telling import Telling, named
from dynscope.hooks.tensor.custom import OwnMetrics
from dynscope.hooks.tensor.measure import Measure, Observed
from dynscope.hooks.tensor.private import inside_backward, is_tracing, keep_in_graphs
from dynscope.hooks.tensor.tally import Tally
from dynscope.hooks.tensor.tensors import comparable, local, observable, unreadable, version
from dynscope.hooks.watch.backward import BackwardEnd
from dynscope.hooks.watch.padding import ELSEWHERE, UNREADABLE, Mask, Padding, Unmasked, Verdict
from dynscope.hooks.watch.rows import Pass, Row, Switch

FORWARD, BACKWARD, INPUT = 0, 1, 2

_observers: "weakref.WeakValueDictionary[int, Observer]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


@torch.library.custom_op("dynscope::observe", mutates_args=())
def _observe(
    x: Tensor, reference: Tensor | None, mask: Tensor | None, where: Tensor, mode: int
) -> None:
    number, row = where.tolist()
    observer = _observers.get(number)
    if observer is not None:
        observer.observe(row, mode, x, reference, mask=observer.verdict(mode, mask))


@_observe.register_fake
def _(x: Tensor, reference: Tensor | None, mask: Tensor | None, where: Tensor, mode: int) -> None:
    return None


# Without an output nothing depends on the operator: say that it is not dead code.
keep_in_graphs(torch.ops.dynscope.observe.default)


class Observer:
    """Owns the rows and what one recorded step adds to them."""

    def __init__(
        self,
        rows: list[Row],
        tally: Tally,
        measure: Measure,
        own: OwnMetrics,
        telling: Telling,
        *,
        backward: bool = True,
        padding: Padding | None = None,
    ) -> None:
        self.rows, self.tally, self.measure = rows, tally, measure
        self.switch = Switch()
        self.backward = backward
        self.order: list[int] = []  # rows in the order of their first call
        self.cost = 0.0  # seconds spent since the last drain
        self.current = Pass()
        self.retyped: list[int] = []  # rows whose output came in another dtype than before
        self.started = False  # a forward has begun since the last optimizer step
        self.backward_end: BackwardEnd | None = None
        self.padding = padding
        self._elsewhere = set() if padding is None else padding.elsewhere([r.path for r in rows])
        self._scratch: Tally | None = None
        self._own, self._telling = own, telling
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
        if is_tracing():
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
        mask: Verdict = None,
        aside: bool = False,
    ) -> None:
        """Reduce ``x`` into ``row``; never raises. ``seen`` is the tensor before detaching.

        With a ``mask`` only real positions count; ``aside``: it is a call under no_grad.
        """
        if self.current.observing:
            return
        started = time.perf_counter()
        if mode == BACKWARD and self.backward_end is not None:
            self.backward_end.wake()
        place = self.rows[row]
        self.current.observing = True
        try:
            if self._counts(row, mode, aside) and not place.quiet and observable(x):
                with torch.no_grad(), _one_at_a_time:
                    if isinstance(mask, Mask) and place.path in self._elsewhere:
                        mask = ELSEWHERE
                    if isinstance(mask, Mask):
                        self._reduce_real(row, mode, local(x), reference, mask)
                    elif mask is None or self._unmasked(place, mode, mask):
                        self._reduce(row, mode, local(x), reference, seen)
        except Exception as error:
            self.fail(row, error)
        finally:
            self.current.observing = False
        self.cost += time.perf_counter() - started

    def _counts(self, row: int, mode: int, aside: bool) -> bool:
        """Whether this is a pass of the training that was not counted before.

        A forward inside a backward is a recomputation. It is the first that is seen of a part of
        the model under reentrant checkpointing that is called by itself: with grad mode off, as
        in an evaluation. A call under no_grad inside a training forward counts (a frozen part),
        but not beside others that are trained on (the same network as its own teacher).
        """
        place = self.rows[row]
        if mode == BACKWARD:
            return self.switch.armed
        if not inside_backward():
            place.counted = True
            if aside and place.trained:
                return False
            if not aside and place.aside and not place.trained:
                self.tally.clear_row(row)
            place.aside |= aside
            place.trained |= not aside
        elif place.counted:
            return False
        return self.switch.armed

    def aside(self) -> bool:
        """Whether an eager call inside a training forward is under no_grad: not in the forward of an
        autograd function, where grad mode is off too, as under reentrant checkpointing.
        """
        return not torch.is_grad_enabled() and not _in_function(sys._getframe(1))

    def unreadable(self, row: int, x: Tensor) -> None:
        """Say why an output of the training is not recorded."""
        if reason := unreadable(x):
            self._telling.missing(None, "site", self.rows[row].path, "", reason)

    def fail(self, row: int, error: Exception) -> None:
        """The row goes quiet and the run goes on."""
        place = self.rows[row]
        if not place.quiet:
            place.quiet = True
            self._telling.failed(place.path, named(error))

    def verdict(self, mode: int, given: Tensor | None = None) -> Verdict:
        """Which positions count in what is observed now; ``given``: the mask that it has."""
        if self.padding is None:
            return None
        if given is not None:
            with self._telling.guarded("the mask"):
                return self.padding.of(given)
            return UNREADABLE
        return self.padding.of_backward() if mode == BACKWARD else self.padding.now

    def _unmasked(self, place: Row, mode: int, why: Unmasked) -> bool:
        """Say why there is no mask; whether all positions count then."""
        if why is ELSEWHERE:
            self._telling.missing(None, place.kind, place.path, "mask", why.reason)
        elif why.counts:
            self._telling.missing(None, "pass", "", "mask", why.reason)
        elif place.kind == "site":
            self._telling.missing(None, "site", place.path, "activation_gradient", why.reason)
        return why.counts

    def _reduce_real(
        self, row: int, mode: int, x: Tensor, reference: Tensor | None, mask: Mask
    ) -> None:
        """Reduce the real positions of ``x``, if it has positions."""
        place = self.rows[row]
        real = mask.select(x, place.layout)
        if real is None:
            if mask.misses(x) and place.kind == "site":
                reason = f"the mask {mask.shape} does not fit its output: all positions count"
                self._telling.missing(None, "site", place.path, "mask", reason)
            self._reduce(row, mode, x, reference)
            return
        if reference is not None:
            reference = mask.select(local(reference), place.layout)
        if self._scratch is None or self._scratch.device != self.tally.device:
            self._scratch = self.tally.single()
        self._scratch.clear()
        self._reduce(row, mode, real, reference, into=(self._scratch, 0, "btc"))
        self.tally.take_in(row, self._scratch, mask.places)

    def _reduce(
        self,
        row: int,
        mode: int,
        x: Tensor,
        reference: Tensor | None,
        seen: Tensor | None = None,
        into: tuple[Tally, int, str] | None = None,
    ) -> None:
        """Add what belongs to ``row`` to the tally, or to a row of another; with the layout there."""
        place = self.rows[row]
        tally, at, layout = into or (self.tally, row, place.layout)
        if mode == INPUT:
            self.measure.input(x).add_to(tally, at)
            return
        if place.kind == "size":
            self.measure.size(x).add_to(tally, at)
            return
        observed = self._again(seen, mode, layout) if reference is None else None
        if observed is None:
            if mode == BACKWARD:
                observed = self.measure.gradient(x)
            else:
                on_host = self.tally.on_host is not None
                observed = self.measure.output(x, comparable(x, reference), layout, on_host=on_host)
            if seen is not None:
                self._last = weakref.ref(seen), version(seen), mode, layout, observed
        observed.add_to(tally, at)
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
        if last() is seen and state == [version(seen), mode, layout]:
            return observed.unpaired()
        return None

    def forget(self) -> None:
        """Start a step with nothing observed."""
        self._last = None
        self.cost = 0.0
        for row in self.rows:
            row.counted = row.trained = row.aside = False
        self.current.module = self.current.training = None
        if self.padding is not None:
            self.padding.forget()


def _in_function(frame: FrameType | None) -> bool:
    """Whether Python is inside the forward of an autograd function."""
    while frame is not None:
        if _is_forward_of_function(frame.f_code):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=4096)
def _is_forward_of_function(code: CodeType) -> bool:
    """Whether some autograd function has this code as its forward."""
    waiting: list[type] = [torch.autograd.Function]
    while waiting:
        one = waiting.pop()
        waiting += type.__subclasses__(one)
        forward = inspect.unwrap(getattr(vars(one).get("forward"), "__func__", _in_function))
        if getattr(forward, "__code__", None) is code:
            return True
    return False


# The fused reduction keeps its sums in one place, and threads may train side by side. A metric of
# the user's own may call a model that another recorder watches, hence the R.
_one_at_a_time = threading.RLock()
