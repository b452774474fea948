"""The recorder: what `attach` returns. It owns the hooks, the tally, the schedule and the feed."""

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynscope.feed import Feed
from dynscope.hooks import columns, parts, weights
from dynscope.hooks.anatomy import Anatomy
from dynscope.hooks.backward import BackwardEnd
from dynscope.hooks.cost import Cost
from dynscope.hooks.coverage import Coverage
from dynscope.hooks.custom import OwnMetrics, SiteMetric
from dynscope.hooks.delivery import Delivery
from dynscope.hooks.forward import returned
from dynscope.hooks.fused import Compilation
from dynscope.hooks.links import Links
from dynscope.hooks.measure import Measure
from dynscope.hooks.observation import Observer
from dynscope.hooks.optimizer import evaluates, found_inf, read_optimizer, within_a_step
from dynscope.hooks.padding import Padding
from dynscope.hooks.parameters import ParameterWatch
from dynscope.hooks.places import Places, hook_root
from dynscope.hooks.scaling import Scaling
from dynscope.hooks.schedule import Schedule
from dynscope.hooks.tally import Drained, Tally
from dynscope.hooks.telling import Telling, log
from dynscope.hooks.tensors import local


@dataclass(frozen=True)
class Plan:
    """What to record and when: `attach`'s arguments, resolved."""

    record: Schedule
    weigh: Schedule
    light: bool
    full: bool
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
        anatomy: Anatomy,
        places: Places,
        feed: Feed,
        plan: Plan,
        *,
        optimizer: torch.optim.Optimizer | None,
        scaler: Any | None,
        start_step: int,
    ) -> None:
        self.anatomy, self.path = anatomy, feed.path
        self.steps = start_step  # optimizer steps done
        self.closed = False
        self._model, self._optimizer, self._scaling = model, optimizer, Scaling(scaler)
        self._feed, self._plan, self._places = feed, plan, places
        self._telling = telling = Telling(feed, lambda: self.steps)
        self._guarded, light = telling.guarded, plan.light
        self._compilation = Compilation.shared()
        measure = Measure(self._compilation, light=light, full=plan.full)
        self._own = own = OwnMetrics(plan.custom, telling)
        self._watch = ParameterWatch(anatomy, measure, own, telling, light=light, full=plan.full)
        self._links = Links(anatomy.modules)
        self._columns = columns.Columns(anatomy, places, feed)
        followed = optimizer is not None and not light
        self._coverage = Coverage(anatomy, places, telling, light=light, updates=followed)
        tally = self._new_tally()
        self._observer = Observer(places.rows, tally, measure, own, telling, backward=not light)
        self._backward = self._observer.backward_end = BackwardEnd(self._backward_ended)
        self._passed = False  # a backward has ended since the last step, and left gradients
        self._dropped = False  # what was observed since the last step was dropped on the way
        self._stepping = False  # the optimizer is in its step
        self._stepped = False  # it has been, since the last forward began
        self._delivery = Delivery(feed, telling, patient=optimizer is not None)
        self._cost = Cost(plan.budget)
        self._timed = self._cost.timed
        self._skipping = False
        self._weighed = -1
        self._handles = self._hook(model)
        feed.parameters(columns.parameters(anatomy, self._watch.current(), optimizer))
        with self._guarded("the weights"):
            self._weigh(start_step)
        self._arm()
        self._cost.start()
        _recorders.add(self)

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
            if self._optimizer is not None:
                self._delivery.release()
                return
            if step is not None:
                self.steps = int(step) - 1
            if self._observer.switch.armed:
                with self._timed():
                    if (
                        self._observer.started or self._blind
                    ):  # else what lies in .grad is of an earlier step
                        self._watch.read_gradients(self._observer.tally)
                    self._watch.after_step(self._observer.tally)
            self._finish_step()

    def before_clip(self) -> None:
        """Call before clipping: gradient/norm_before_clip is recorded beside gradient/norm."""
        if self._observer.switch.armed and not self.closed:
            with self._guarded("before_clip"), self._timed():
                self._watch.read_before_clip(self._observer.tally)

    def close(self) -> None:
        """Record the weights once more, remove every hook and finish the file."""
        if self.closed:
            return
        with self._guarded("close"):
            if self.steps > max(self._weighed, 0):
                self._weigh(self.steps)
            self._delivery.release()
        self.disown()
        for handle in self._handles:
            handle.remove()
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

    def _hook(self, model: nn.Module) -> list[RemovableHandle]:
        handles = self._places.hook(self.anatomy, self._observer, self._telling)
        root = self.anatomy.modules.get("", model)
        roots = hook_root(model, root, self._observer, self._entered)
        self._blind = not roots  # TorchScript through and through: forwards are not seen
        handles += roots
        if self._optimizer is not None:
            handles.append(self._optimizer.register_step_pre_hook(self._before_step))
            handles.append(self._optimizer.register_step_post_hook(self._after_step))
        return handles

    def _entered(self, training: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward begins."""
        if self.closed:
            return
        if self._plan.padding is not None and training and self._observer.switch.armed:
            self._observer.mask = None
            with self._guarded("mask"):
                self._observer.mask = self._plan.padding.of(module, args, kwargs)
                self._observer.masks += 1
        with self._guarded("a forward"):
            self._delivery.release()
            self._observer.started |= training
            if training and self._observer.switch.armed:
                self._drop_if_skipped()
                self._drop_if_cleared()
            self._backward.forget()

    def _backward_ended(self) -> None:
        """A backward is over, and what it left in the gradients has not been touched yet."""
        if self.closed or not self._observer.switch.armed:
            return
        with self._guarded("the end of a backward"), self._timed():
            reachable = any(p is not None and p.requires_grad for p in self._watch.current())
            left = any(g is not None for g in self._watch.gradients())
            self._passed = left or not reachable
            self._observer.masks = 0
            if self._optimizer is not None and self._plan.world_size == 1:  # else not reduced yet
                self._watch.backward_ended(self._scaling.scale())

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.closed or within_a_step(optimizer):
            return
        self._skipping, self._stepping = False, True
        with self._guarded("optimizer step"), self._timed():
            self._delivery.release()
            if self._scaling.find() and self._scaling.has_skipped():
                self._skip(
                    "the gradient scaler skipped steps before this one", drop=not self._dropped
                )
            self._skipping = found_inf(optimizer)
            if not self._observer.switch.armed:
                return
            tally = self._observer.tally
            read_optimizer(optimizer, tally)
            known, now = len(tally.optimizer), len(optimizer.param_groups)
            self._coverage.groups(self.steps + 1, known, now)
            if not evaluates(args, kwargs):
                self._watch.read_gradients(tally, getattr(optimizer, "grad_scale", None))
            self._watch.before_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.closed or within_a_step(optimizer):
            return
        self._stepping = False
        with self._guarded("optimizer step"):
            if self._skipping:
                self._scaling.forget()
                self._skip()
                return
            self._stepped = True
            if self._observer.switch.armed:
                with self._timed():
                    if evaluates(args, kwargs):
                        self._watch.read_gradients(self._observer.tally)
                    self._watch.after_step(self._observer.tally)
            self._finish_step()

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
        self._passed, self._dropped = False, True

    def _drop_if_skipped(self) -> None:
        """Forget what belongs to a step that the scaler skipped: its scale has gone down."""
        kept, stepped = self._scaling.kept(), self._stepped
        self._stepped = False
        if kept is None or stepped:
            return
        if kept.device.type != "cpu":
            self._observer.tally.keep_if(kept.to(self._observer.tally.device))
        elif not kept:
            self._skip()

    def _drop_if_cleared(self) -> None:
        """Forget passes whose gradients were cleared before a step used them.

        A discriminator's pass in the generator's step, or a batch that the loop chose to skip.
        Within an optimizer's own step (LBFGS) every evaluation counts.
        """
        if not self._passed or self._stepping or not _cleared(self._watch.gradients()):
            return
        self._drop()
        reason = "passes whose gradients were cleared before a step used them do not count"
        self._telling.missing(self.steps + 1, "pass", "", "activation", reason)

    def _finish_step(self) -> None:
        with self._timed():
            self._end_step()

    def _end_step(self) -> None:
        self.steps += 1
        if reason := self._watch.finish() or (self._backward.unseen and _NO_END):
            self._telling.missing(self.steps, "parameter", "", "gradient/norm_before_clip", reason)
        self._passed = self._dropped = False
        with self._guarded("the step's row"):
            if self._observer.switch.armed:
                self._drain()
        with self._guarded("weights_every"):
            if self._plan.weigh(self.steps):
                self._weigh(self.steps)
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
                self._follow_replaced()
                if self._device() != self._observer.tally.device:
                    self._observer.tally = self._new_tally()
                if self._optimizer is None:
                    self._watch.before_step(None)
            self._observer.switch.armed = armed and not self.closed

    def _follow_replaced(self) -> None:
        """Hook the modules that were put in place of others since the last recorded step."""
        replaced = self._links.follow()
        if not replaced:
            return
        for handle in self._handles:
            handle.remove()
        self._watch.relink(self.anatomy)
        self._handles = self._hook(self._model)
        names = ", ".join(replaced[:4]) + (" and more" if len(replaced) > 4 else "")
        self.tell("replaced", f"{names}: replaced or removed after attaching, followed from here")

    def _current_step(self) -> int:
        return self.steps + (self._observer.started or self.steps == 0)

    # From the tally to the file

    def _device(self) -> torch.device:
        tensors = (t for t in self._watch.current() if t is not None and not t.is_meta)
        return next((t.device for t in tensors), torch.device("cpu"))

    def _new_tally(self) -> Tally:
        rows, parameters = len(self._places.rows), len(self._watch.names)
        groups = len(self._optimizer.param_groups) if self._optimizer is not None else 0
        lengths = self._own.lengths(rows, parameters)
        return Tally(rows, parameters, groups, lengths, self._device())

    def _drain(self) -> None:
        step, now, tally = self.steps, time.time(), self._observer.tally
        self._discover(step)
        scale = self._scaling.scale()
        if scale is not None:
            tally.unscale(scale)
        drained, rows = tally.drain(), self._columns.array()
        cost, on_host = self._cost.take(self._observer.cost), tally.on_host is not None

        def send() -> None:
            with self._timed() if on_host else contextlib.nullcontext():  # else a thread waits
                arrays = self._arrays(drained, rows)
                self._coverage.row(step, arrays)
                tokens = self._delivery.tokens
                self._feed.row(step, now, arrays, via="tally", tokens=tokens, cost=cost)

        self._delivery.hold(send, on_host=on_host)

    def _discover(self, step: int) -> None:
        """Tell the file what this step has shown of the sites: their first call, another dtype."""
        retyped = [self._places.rows[row] for row in self._observer.retyped]
        self._observer.retyped.clear()
        if retyped:
            self._feed.event(step, time.time(), "dtype", columns.retyped(retyped))
        first = not self._columns.rows
        self._columns.extend(self._observer.order)
        if first and self._columns.rows:
            self._coverage.uncalled(step, set(self._columns.rows))

    def _arrays(self, drained: Drained, rows: np.ndarray) -> dict[str, np.ndarray]:
        return self._own.merged(drained()) | {
            "columns": rows,
            "branch": np.array(self._places.branch),
            "residual": np.array(self._places.residual),
            "numel": self._watch.numel(),
        }

    def _weigh(self, step: int) -> None:
        """Record the weights, on a schedule and an axis of their own."""
        if self._plan.light:
            return
        self._weighed = step
        taken = weights.collect(
            parts.with_parts(self.anatomy.parameters, self._watch.current(), self.anatomy.layouts)
        )
        self._feed.weights(step, time.time(), taken, via="histograms")


_NO_END = "a backward inside another one has no end of its own: call scope.before_clip()"


def _cleared(gradients: Sequence[Tensor | None]) -> bool:
    """Whether no gradient is left, or on the host only zeros."""
    return not any(
        g.device.type != "cpu" or g.is_sparse or bool(local(g).reshape(-1)[:4096].any())
        for g in gradients
        if g is not None
    )


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
