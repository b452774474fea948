"""The recorder: what `attach` returns. It owns the hooks, the tally, the schedule and the feed."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from dynscope.hooks import process
from dynscope.hooks.model.anatomy import Anatomy
from dynscope.hooks.recording.steps import Steps
from dynscope.hooks.recording.survey import Survey, Tools, retrace
from dynscope.hooks.telling.delivery import Delivery
from dynscope.hooks.telling.telling import Telling, log
from dynscope.hooks.tensor.custom import OwnMetrics, SiteMetric
from dynscope.hooks.tensor.fused import Compilation
from dynscope.hooks.tensor.measure import Measure
from dynscope.hooks.training.cost import Cost
from dynscope.hooks.training.optimizer import Optimizers
from dynscope.hooks.training.parameters import ParameterWatch
from dynscope.hooks.training.schedule import Schedule
from dynscope.hooks.watch.forward import returned
from dynscope.hooks.watch.observation import Observer
from dynscope.hooks.watch.padding import Padding
from dynscope.hooks.watch.places import Places
from dynscope.writing.feed import Feed


@dataclass(frozen=True)
class Plan:
    """What to record and when: `attach`'s arguments, resolved."""

    record: Schedule
    weigh: Schedule
    light: bool
    full: bool
    survey: Callable[[], tuple[Anatomy, Places]]
    custom: tuple[SiteMetric, ...] = ()
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
        self._model, self._optimizers = model, optimizers
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
        self._delivery = Delivery(feed, telling, patient=bool(optimizers), tokens=tokens)
        self._cost = Cost(plan.budget)
        self._timed = self._cost.timed
        self._around = Steps(
            optimizers, scaler, telling, feed, self._cost, plan.padding,
            survey=lambda: None if self.closed else self._survey,
            done=lambda: self.steps,
            finish=self._finish_step,
        )  # fmt: skip
        self._weighed = -1
        self._survey = self._new_survey()
        self._around.hook()
        for each in optimizers.wrappers():
            self.tell("optimizer", each)
        with self._guarded("the weights"):
            self._survey.describe()
            self._weigh(start_step)
        self._arm()
        self._cost.start()
        process.add(self)

    @property
    def anatomy(self) -> Anatomy:
        """What was decided about the model, as it is built now."""
        return self._survey.anatomy

    def _new_survey(self) -> Survey:
        survey = Survey(self._model, *self._plan.survey(), self._tools, self._entered)
        survey.observer.backward_end = self._around.backward
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
                        self._around.read_gradients(self._survey)
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
        self._around.before_clip()

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
        self._around.unhook()
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
            self._around.forward(training=training)
        if self._plan.padding is not None and training and self._observer.switch.armed:
            with self._guarded("the mask"):
                self._plan.padding.enter(module, args, kwargs)

    # Steps

    def _finish_step(self) -> None:
        with self._timed():
            self._end_step()

    def _end_step(self) -> None:
        self._delivery.release()
        self.steps += 1
        self._around.finished(self._survey)
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
        scale = self._around.scaling.scale()
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
