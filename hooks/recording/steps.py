"""Around the optimizers' steps: what they apply and change, and when a training step is over."""

import sys
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dynscope.hooks.recording.survey import Survey
from dynscope.hooks.telling.telling import Telling
from dynscope.hooks.tensor.private import inside_backward
from dynscope.hooks.training.cost import Cost
from dynscope.hooks.training.optimizer import (
    Optimizers,
    evaluates,
    found_inf,
    in_a_step,
    read_optimizer,
)
from dynscope.hooks.training.passes import Passes
from dynscope.hooks.training.scaling import Scaling
from dynscope.hooks.training.unclipped import ClippingHook, Given
from dynscope.hooks.watch.backward import BackwardEnd
from dynscope.hooks.watch.padding import Padding
from dynscope.writing.feed import Feed


class Steps:
    """Follows each training step from its first forward to the optimizers' last hook.

    ``survey`` gives what is observed now, or None when nothing is any more; ``done`` the number of
    training steps taken; ``finish`` is called when one more is over.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        scaler: Any | None,
        telling: Telling,
        feed: Feed,
        cost: Cost,
        padding: Padding | None,
        *,
        survey: Callable[[], Survey | None],
        done: Callable[[], int],
        finish: Callable[[], None],
    ) -> None:
        self.scaling, self.backward = Scaling(scaler), BackwardEnd(self._backward_ended)
        self._optimizers, self._passes = optimizers, Passes(self.scaling)
        self._telling, self._feed, self._cost, self._padding = telling, feed, cost, padding
        self._survey, self._done, self._finish = survey, done, finish
        self._skipping = False  # the step under way changes nothing
        self._read_inside = False  # a step inside of it has told what is applied
        self._stepped_inside = False  # of the backward under way

    def hook(self) -> None:
        self._optimizers.hook(self._before, self._after, self._other)
        self._clipping = ClippingHook(self.before_clip)

    def unhook(self) -> None:
        self._optimizers.unhook()
        self._clipping.remove()

    def _armed(self) -> Survey | None:
        """What is observed, if this step is recorded."""
        survey = self._survey()
        return survey if survey is not None and survey.observer.switch.armed else None

    # From forward to step

    def forward(self, *, training: bool) -> None:
        """A forward begins."""
        if not self._optimizers.under_way():
            self._passes.stepping = False  # a step that raised is over too
        if training and (survey := self._armed()):
            self._drop_if_skipped(survey)
            self._drop_if_cleared(survey)
            self._before_gradients(survey)
        self.backward.forget()

    def _before_gradients(self, survey: Survey) -> None:
        """Gradients change from here on, until they are clipped and applied."""
        survey.watch.renew()
        self._optimizers.go_last()

    def _backward_ended(self) -> None:
        """A backward is over, and what it left in the gradients has not been touched yet."""
        with self._telling.guarded("the end of a backward"), self._cost.timed():
            if survey := self._armed():
                reachable = any(p is not None and p.requires_grad for p in survey.watch.current())
                left = any(g is not None for g in survey.watch.gradients())
                self._passes.ended = left or not reachable
                if self._padding is not None:
                    self._padding.backward_ended()
                self._before_gradients(survey)
            stepped, self._stepped_inside = self._stepped_inside, False
            if stepped and self._optimizers.ended() and self._survey():
                self._finish()

    def before_clip(self, given: Given | None = None) -> None:
        """Gradients are about to be clipped: those ``given``, or all."""
        with self._telling.guarded("before_clip"), self._cost.timed():
            if survey := self._armed():
                scaled = self.scaling.left_in(self._optimizers)
                survey.watch.read_before_clip(self.scaling.scaler, scaled=scaled, given=given)

    # The optimizers' hooks

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        caller = sys._getframe(1)
        with self._telling.guarded("optimizer step"), self._cost.timed():
            if not self._survey():
                return
            inner = in_a_step(self._optimizers.family(optimizer), caller)
            if not inner:
                self._begin(optimizer)
            survey = self._armed()
            if survey is None:
                return
            if not evaluates(args, kwargs):
                self.read_gradients(survey, optimizer, getattr(optimizer, "grad_scale", None))
                self._read_inside = inner  # what it applies is what is applied
            if not inner:
                self._read_settings(survey, optimizer)

    def _begin(self, optimizer: Optimizer) -> None:
        self._passes.stepping, self._read_inside = True, False
        if inside_backward():
            self.backward.wake()
        another = self.scaling.find(optimizer, alone=self._optimizers.alone())
        if another and self.scaling.has_skipped():
            what = "the gradient scaler skipped steps before this one"
            self._skip(what, drop=not self._passes.dropped)
        self._skipping = found_inf(optimizer)

    def _read_settings(self, survey: Survey, optimizer: Optimizer) -> None:
        """The optimizer's settings, and the weights before its update."""
        tally = survey.observer.tally
        outer, place, groups = self._optimizers.group_places(optimizer)
        read_optimizer(outer, tally, place)
        survey.coverage.groups(self._done() + 1, len(tally.optimizer), groups)
        survey.watch.before_step(outer)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        caller = sys._getframe(1)
        with self._telling.guarded("optimizer step"), self._cost.timed():
            if not self._survey() or in_a_step(self._optimizers.family(optimizer), caller):
                return
            self._passes.stepping = False
            if self._skipping:
                if self._optimizers.alone():  # of several, the scale's going down tells
                    self.scaling.forget()
                    self._skip()
                return
            self._passes.stepped = True
            if survey := self._armed():
                if evaluates(args, kwargs) and not self._read_inside:
                    self.read_gradients(survey, optimizer)
                survey.watch.after_step(survey.observer.tally)
            over = self._optimizers.stepped(optimizer)
            if inside_backward() and self.backward.coming:
                self._stepped_inside = True
            elif over:
                self._finish()

    def _other(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer steps that may not be ours."""
        if self._passes.stepping or self._optimizers.knows(optimizer):
            return
        with self._telling.guarded("another optimizer"):
            if survey := self._survey():
                mine = {id(p) for p in survey.watch.current() if p is not None and p.requires_grad}
                replaced = self._optimizers.replace(optimizer, mine)
                if replaced and self._telling.once(replaced):
                    self._telling.tell("replaced", replaced)

    def read_gradients(
        self,
        survey: Survey,
        optimizer: Optimizer | None = None,
        scale: Tensor | float | None = None,
    ) -> None:
        """Of one optimizer all gradients, also of parameters that no optimizer holds."""
        tally, watch, scaling = survey.observer.tally, survey.watch, self.scaling
        only = None if self._optimizers.alone() else optimizer
        watch.read_gradients(tally, scale, only)
        if unknown := watch.write_before_clip(tally, scaling.scaler, scaling.scale(), only):
            self._missing("metric", "gradient/norm_before_clip", unknown)
        if optimizer is not None and not self._optimizers.is_last(optimizer):
            self._missing("metric", "gradient/norm", _NOT_LAST)

    def _missing(self, kind: str, metric: str, reason: str) -> None:
        self._telling.missing(self._done() + 1, kind, "", metric, reason)

    # What does not count

    def _skip(self, message: str = "the gradient scaler skipped it", *, drop: bool = True) -> None:
        """A gradient scaler found non-finite gradients: nothing was applied, nothing counts."""
        if drop and (survey := self._survey()):
            self._drop(survey)
        self._feed.event(self._done() + 1, time.time(), "skipped", message)

    def _drop(self, survey: Survey) -> None:
        """What was observed since the last step belongs to none."""
        survey.observer.tally.clear()
        survey.observer.forget()
        survey.watch.finish()
        self._passes.finish(dropped=True)

    def _drop_if_skipped(self, survey: Survey) -> None:
        """Forget what belongs to a step that the scaler skipped: its scale has gone down."""
        kept = self._passes.kept()
        if kept is None:
            return
        if kept.device.type != "cpu":
            survey.observer.tally.keep_if(kept.to(survey.observer.tally.device))
        elif not kept:
            self._skip()

    def _drop_if_cleared(self, survey: Survey) -> None:
        """Forget passes whose gradients were cleared before a step used them."""
        if self._passes.cleared(survey.watch.gradients()):
            self._drop(survey)
            self._missing("pass", "activation", _CLEARED)

    def finished(self, survey: Survey) -> None:
        """The training step has been taken."""
        survey.watch.finish()
        self._optimizers.finish()
        self._passes.finish()


_NOT_LAST = "hooks registered since the last backward run later and may change gradients"
_CLEARED = "passes whose gradients were cleared before a step used them do not count"
