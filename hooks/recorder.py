"""The recorder: what `attach` returns. It owns the hooks, the tally, the schedule and the feed."""

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from dynscope.feed import Feed
from dynscope.hooks.anatomy import Anatomy
from dynscope.hooks.backward import BackwardEnd, inside_backward
from dynscope.hooks.cost import Cost
from dynscope.hooks.custom import OwnMetrics, SiteMetric
from dynscope.hooks.delivery import Delivery
from dynscope.hooks.forward import returned
from dynscope.hooks.fused import Compilation
from dynscope.hooks.measure import Measure
from dynscope.hooks.observation import Observer
from dynscope.hooks.optimizer import (
    Optimizers,
    evaluates,
    found_inf,
    in_a_step,
    read_optimizer,
)
from dynscope.hooks.padding import Padding
from dynscope.hooks.parameters import ParameterWatch
from dynscope.hooks.passes import Passes
from dynscope.hooks.places import Places
from dynscope.hooks.scaling import Scaling
from dynscope.hooks.schedule import Schedule
from dynscope.hooks.survey import Survey, Tools, retrace
from dynscope.hooks.telling import Telling, log
from dynscope.hooks.unclipped import ClippingHook, Given


@dataclass(frozen=True)
class Plan:
    """What to record and when: `attach`'s arguments, resolved."""

    record: Schedule
    weigh: Schedule
    light: bool
    full: bool
    survey: Callable[[], tuple[Anatomy, Places]]
    custom: tuple[SiteMetric, ...] = ()
    world_size: int = 1
    budget: float | None = None
    padding: Padding | None = None


class Recorder:
    """Records a model's training into a run file until it is closed.

    With an optimizer it counts the optimizer's steps itself; without one, call `step` once per
    step. Use it as a context manager, or call `close`. Nothing in here changes the training, and
    after construction nothing raises into it: an error of ours is told once and recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        plan: Plan,
        *,
        optimizers: Optimizers,
        scaler: Any | None,
        start_step: int,
        tokens: int = -1,
    ) -> None:
        self.path = feed.path
        self.steps = start_step  # optimizer steps done
        self.closed = False
        self._model, self._optimizers, self._scaling = model, optimizers, Scaling(scaler)
        self._feed, self._plan = feed, plan
        self._telling = telling = Telling(feed, lambda: self.steps)
        self._guarded = telling.guarded
        self._compilation = Compilation.shared()
        measure = Measure(self._compilation, light=plan.light, full=plan.full)
        self._own = OwnMetrics(plan.custom, telling)
        self._tools = Tools(
            feed, telling, measure, self._own, optimizers, groups=len(optimizers.groups()),
            light=plan.light, full=plan.full, padding=plan.padding,
        )  # fmt: skip
        self._backward = BackwardEnd(self._backward_ended)
        self._passes = Passes(self._scaling)
        self._delivery = Delivery(feed, telling, patient=bool(optimizers), tokens=tokens)
        self._cost = Cost(plan.budget)
        self._timed = self._cost.timed
        self._skipping = self._read_inside = self._stepped_inside = False
        self._weighed = -1
        self._survey = self._new_survey()
        optimizers.hook(self._before_step, self._after_step, self._other_steps)
        self._clipping = ClippingHook(self._clipped)
        for each in optimizers.wrappers():
            self.tell("optimizer", each)
        with self._guarded("the weights"):
            self._survey.describe()
            self._weigh(start_step)
        self._arm()
        self._cost.start()
        _recorders.add(self)

    @property
    def anatomy(self) -> Anatomy:
        """What was decided about the model, as it is built now."""
        return self._survey.anatomy

    def _new_survey(self) -> Survey:
        survey = Survey(self._model, *self._plan.survey(), self._tools, self._entered)
        survey.observer.backward_end = self._backward
        return survey

    @property
    def _observer(self) -> Observer:
        return self._survey.observer

    @property
    def _watch(self) -> ParameterWatch:
        return self._survey.watch

    # What the user calls

    def log(self, /, *, step: int | None = None, **values: float | Tensor) -> None:
        """Record scalars, as in ``scope.log(loss=loss)``; tensors are not waited for.

        They belong to the step in progress, or to the one just done when no forward has begun
        since. ``tokens=`` is counted as in `step`.
        """
        if self.closed:
            return
        with self._guarded("log"):
            tokens = values.pop("tokens", None)
            if tokens is not None:
                self._delivery.count(int(tokens))
            at = self._current_step() if step is None else int(step)
            self._delivery.scalars(at, values)

    def step(self, *, tokens: int | None = None, step: int | None = None) -> None:
        """End of a training step where there is no optimizer to tell; ``tokens`` seen in it.

        With an optimizer the steps are its own, and this only adds ``tokens``. ``step`` sets the
        number of the step just done.
        """
        if self.closed:
            return
        with self._guarded("step"):
            if tokens is not None:
                self._delivery.count(int(tokens))
            if self._optimizers:
                self._delivery.release()
                if step is not None and int(step) != self.steps:
                    self._refuse(int(step))
                return
            if step is not None:
                self.steps = int(step) - 1
            if self._observer.switch.armed:
                with self._timed():
                    if (
                        self._observer.started or self._survey.blind
                    ):  # else what lies in .grad is of an earlier step
                        self._read_gradients()
                    self._watch.after_step(self._observer.tally)
            self._finish_step()

    def _refuse(self, step: int) -> None:
        reason = (
            f"scope.step(step={step}): the optimizer counts the steps and this is step {self.steps}; "
            "give attach() start_step= for another beginning, or no optimizer= to count yourself"
        )
        if self._telling.once(reason.partition("=")[0]):
            log.warning("dynscope: %s", reason)
            self.tell("step", reason)

    def before_clip(self) -> None:
        """Call before clipping by other means than PyTorch's functions, which are seen:
        gradient/norm_before_clip is recorded beside gradient/norm."""
        self._clipped(None)

    def _clipped(self, given: Given | None) -> None:
        """Gradients are about to be clipped: those ``given``, or all."""
        if self._observer.switch.armed and not self.closed:
            with self._guarded("before_clip"), self._timed():
                scaled = self._scaling.left_in(self._optimizers)
                self._watch.read_before_clip(self._scaling.scaler, scaled=scaled, given=given)

    def close(self) -> None:
        """Record the weights once more, remove every hook and finish the file."""
        if self.closed:
            return
        with self._guarded("close"):
            if self.steps > max(self._weighed, 0):
                self._weigh(self.steps)
            self._delivery.release()
        self.disown()
        self._survey.unhook()
        self._optimizers.unhook()
        self._clipping.remove()
        self._delivery.close()
        self._feed.close()

    def tell(self, kind: str, message: str) -> None:
        """Say something in the log and in the file."""
        self._telling.tell(kind, message)

    def disown(self) -> None:
        """Nothing is recorded here from now on, whatever is called: in a forked child, at the end."""
        self.closed = True
        self._observer.switch.armed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return returned, (None,)  # a copy of a model that holds its recorder does not record

    # Hooks

    def _entered(self, training: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward begins."""
        if self.closed:
            return
        with self._guarded("a forward"):
            if training and self._observer.switch.armed and not self._observer.started:
                self._follow(module)
            self._delivery.release()
            self._observer.started |= training
            if self._passes.stepping and not self._optimizers.under_way():
                self._passes.stepping = False  # a step that raised
            if training and self._observer.switch.armed:
                self._drop_if_skipped()
                self._drop_if_cleared()
                self._before_gradients()
            self._backward.forget()
        if self._plan.padding is not None and training and self._observer.switch.armed:
            with self._guarded("the mask"):
                self._plan.padding.enter(module, args, kwargs)

    def _before_gradients(self) -> None:
        """Gradients change from here on, until they are clipped and applied."""
        self._watch.renew()
        self._optimizers.go_last()

    def _backward_ended(self) -> None:
        """A backward is over, and what it left in the gradients has not been touched yet."""
        if self.closed:
            return
        if self._observer.switch.armed:
            with self._guarded("the end of a backward"), self._timed():
                reachable = any(p is not None and p.requires_grad for p in self._watch.current())
                left = any(g is not None for g in self._watch.gradients())
                self._passes.ended = left or not reachable
                if self._plan.padding is not None:
                    self._plan.padding.backward_ended()
                self._before_gradients()
        if self._stepped_inside:
            self._stepped_inside = False
            with self._guarded("the end of a backward"):
                if self._optimizers.ended():
                    self._finish_step()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.closed:
            return
        if in_a_step(self._optimizers.family(optimizer), sys._getframe(1)):
            self._before_inner_step(optimizer, args, kwargs)
            return
        self._skipping, self._passes.stepping, self._read_inside = False, True, False
        with self._guarded("optimizer step"), self._timed():
            self._delivery.release()
            if inside_backward():
                self._backward.wake()
            if (
                self._scaling.find(optimizer, alone=self._optimizers.alone())
                and self._scaling.has_skipped()
            ):
                self._skip(
                    "the gradient scaler skipped steps before this one",
                    drop=not self._passes.dropped,
                )
            self._skipping = found_inf(optimizer)
            if not self._observer.switch.armed:
                return
            tally = self._observer.tally
            outer, place, now = self._optimizers.group_places(optimizer)
            read_optimizer(outer, tally, place)
            self._survey.coverage.groups(self.steps + 1, len(tally.optimizer), now)
            if not evaluates(args, kwargs):
                self._read_gradients(optimizer, getattr(optimizer, "grad_scale", None))
            self._watch.before_step(outer)

    def _before_inner_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A step inside of another one: what it applies is what is applied."""
        if self._observer.switch.armed and not evaluates(args, kwargs):
            with self._guarded("optimizer step"), self._timed():
                self._read_gradients(optimizer, getattr(optimizer, "grad_scale", None))
                self._read_inside = True

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.closed or in_a_step(self._optimizers.family(optimizer), sys._getframe(1)):
            return
        self._passes.stepping = False
        with self._guarded("optimizer step"):
            if self._skipping:
                if self._optimizers.alone():  # of several, the scale's going down tells
                    self._scaling.forget()
                    self._skip()
                return
            self._passes.stepped = True
            if self._observer.switch.armed:
                with self._timed():
                    if evaluates(args, kwargs) and not self._read_inside:
                        self._read_gradients(optimizer)
                    self._watch.after_step(self._observer.tally)
            over = self._optimizers.stepped(optimizer)
            if inside_backward() and self._backward.coming:
                self._stepped_inside = True
            elif over:
                self._finish_step()

    def _other_steps(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer steps that may not be ours."""
        if self.closed or self._passes.stepping or self._optimizers.knows(optimizer):
            return
        with self._guarded("another optimizer"):
            mine = {id(p) for p in self._watch.current() if p is not None and p.requires_grad}
            replaced = self._optimizers.replace(optimizer, mine)
            if replaced and self._telling.once(replaced):
                self.tell("replaced", replaced)

    def _read_gradients(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        scale: Tensor | float | None = None,
    ) -> None:
        """Of one optimizer all gradients, also of parameters that no optimizer holds."""
        tally, scaling = self._observer.tally, self._scaling
        only = None if self._optimizers.alone() else optimizer
        self._watch.read_gradients(tally, scale, only)
        unknown = self._watch.write_before_clip(tally, scaling.scaler, scaling.scale(), only)
        if unknown:
            step = self.steps + 1
            self._telling.missing(step, "metric", "", "gradient/norm_before_clip", unknown)
        if optimizer is not None and not self._optimizers.is_last(optimizer):
            reason = "hooks registered since the last backward run later and may change gradients"
            self._telling.missing(self.steps + 1, "metric", "", "gradient/norm", reason)

    # Steps

    def _skip(self, message: str = "the gradient scaler skipped it", *, drop: bool = True) -> None:
        """A gradient scaler found non-finite gradients: nothing was applied, nothing counts."""
        if drop:
            self._drop()
        self._feed.event(self.steps + 1, time.time(), "skipped", message)

    def _drop(self) -> None:
        """What was observed since the last step belongs to none."""
        self._observer.tally.clear()
        self._observer.forget()
        self._watch.finish()
        self._passes.finish(dropped=True)

    def _drop_if_skipped(self) -> None:
        """Forget what belongs to a step that the scaler skipped: its scale has gone down."""
        kept = self._passes.kept()
        if kept is None:
            return
        if kept.device.type != "cpu":
            self._observer.tally.keep_if(kept.to(self._observer.tally.device))
        elif not kept:
            self._skip()

    def _drop_if_cleared(self) -> None:
        """Forget passes whose gradients were cleared before a step used them."""
        if self._passes.cleared(self._watch.gradients()):
            self._drop()
            reason = "passes whose gradients were cleared before a step used them do not count"
            self._telling.missing(self.steps + 1, "pass", "", "activation", reason)

    def _finish_step(self) -> None:
        with self._timed():
            self._end_step()

    def _end_step(self) -> None:
        self.steps += 1
        self._watch.finish()
        self._optimizers.finish()
        self._passes.finish()
        with self._guarded("the step's row"):
            if self._observer.switch.armed:
                self._drain()
        with self._guarded("weights_every"):
            if self._cost.weights_affordable(bool(self._plan.weigh(self.steps))):
                self._weigh(self.steps)
            elif waits := self._cost.weights_stretched():
                self.tell("budget", waits)
        self._observer.started = False
        self._arm()

    def _arm(self) -> None:
        """Decide whether the next step is recorded."""
        self._observer.switch.armed = armed = False
        with self._guarded("every"):
            armed = bool(self._plan.record(self.steps + 1)) and self._cost.affordable()
        with self._guarded("the next step"):
            self._compilation.poll()
            self._observer.forget()
            if armed:
                if stretched := self._cost.stretched():
                    self.tell("budget", stretched)
                if self._survey.device() != self._observer.tally.device:
                    self._observer.tally = self._survey.new_tally()
                if not self._optimizers:
                    self._watch.before_step(None)
            self._observer.switch.armed = armed and not self.closed

    def _follow(self, entered: nn.Module) -> None:
        """Look at the model anew if it was rebuilt; a training pass has just ``entered`` it."""
        before = self._survey
        if not before.outdated():
            return
        before.unhook()
        before.observer.switch.armed = False
        self._survey = self._new_survey()
        retrace()
        self._survey.describe()
        self._observer.current.module, self._observer.current.training = entered, True
        if not self._optimizers:
            self._watch.before_step(None)
        self._observer.switch.armed = True
        self.tell("replaced", before.changes_to(self._survey))

    def _current_step(self) -> int:
        return self.steps + (self._observer.started or self.steps == 0)

    # From the tally to the file

    def _drain(self) -> None:
        step, now, tally = self.steps, time.time(), self._observer.tally
        self._survey.describe()
        if retyped := self._survey.discover(step):
            self._feed.event(step, now, "dtype", retyped)
        scale = self._scaling.scale()
        if scale is not None:
            tally.unscale(scale)
        drained, arrays_of = tally.drain(), self._survey.arrays()
        coverage = self._survey.coverage
        cost, on_host = self._cost.take(self._observer.cost), tally.on_host is not None

        def send() -> None:
            with self._timed() if on_host else contextlib.nullcontext():  # else a thread waits
                arrays = arrays_of(drained)
                coverage.row(step, arrays)
                tokens = self._delivery.tokens
                self._feed.row(step, now, arrays, via="tally", tokens=tokens, cost=cost)

        self._delivery.hold(send, on_host=on_host)

    def _weigh(self, step: int) -> None:
        """Record the weights, on a schedule and an axis of their own."""
        if self._plan.light or not self._survey.described:
            return
        self._weighed = step
        with self._cost.weighing():
            self._feed.weights(step, time.time(), self._survey.weigh(), via="histograms")


_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


def end_recording_of(path: Path) -> bool:
    """Close the recorder of this process that writes ``path``; whether there was one."""
    target = os.path.realpath(path)
    before = [each for each in _recorders if each.path == target and not each.closed]
    for recorder in before:
        log.warning("dynscope: %s is recorded anew, the recording until now is closed", target)
        recorder.close()
    return bool(before)


def _close_all() -> None:
    """The script has ended without `Recorder.close`."""
    for recorder in list(_recorders):
        recorder.close()


def _disown_all() -> None:
    """In a forked child the run belongs to the parent: data loaders and environments record not."""
    for recorder in list(_recorders):
        recorder.disown()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
