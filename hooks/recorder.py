"""The recorder: what `attach` returns. It owns the hooks, the tally, the schedule and the feed."""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynscope.feed import Feed
from dynscope.hooks import parts, weights
from dynscope.hooks.anatomy import Anatomy
from dynscope.hooks.custom import OwnMetrics, SiteMetric
from dynscope.hooks.fused import Compilation
from dynscope.hooks.links import Links
from dynscope.hooks.measure import Measure
from dynscope.hooks.observation import Observer, returned
from dynscope.hooks.parameters import ParameterWatch, read_optimizer
from dynscope.hooks.places import Places, hook_root
from dynscope.hooks.schedule import Schedule
from dynscope.hooks.tally import Drained, Tally
from dynscope.tally import PARAMETER, SUMS

log = logging.getLogger("dynscope")

TOKEN_SECONDS = 0.5  # how long the first row waits for scope.step(tokens=...)


@dataclass(frozen=True)
class Plan:
    """What to record and when: `attach`'s arguments, resolved."""

    record: Schedule
    weigh: Schedule
    light: bool
    full: bool
    custom: tuple[SiteMetric, ...] = ()


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
        self._feed, self._plan, self._places = feed, plan, places
        self._optimizer, self._scaler = optimizer, scaler
        self._compilation = Compilation.shared()
        measure = Measure(self._compilation, light=plan.light, full=plan.full)
        self._told: set[tuple[str, str]] = set()
        own = OwnMetrics(plan.custom, self._failed)
        self._watch = ParameterWatch(
            anatomy, measure, own, self._failed, light=plan.light, full=plan.full
        )
        self._links = Links(anatomy.modules)
        self._columns: list[int] = []  # rows of the tally in the order of the file's sites
        self._observer = Observer(
            places.rows, self._new_tally(), measure, own, self._failed,
            backward=not plan.light,
        )  # fmt: skip
        self._drains = ThreadPoolExecutor(1, "dynscope-drain")
        self._held: Callable[[], None] | None = None
        self._sending = threading.Lock()
        self._tokens = -1
        self._tokens_follow: bool | None = None  # whether scope.step tells them after a step
        self._reading = 0.0  # seconds spent around the optimizer in this step
        self._skipping = False
        self._scale: Tensor | None = None
        self._weighed = -1
        self.closed = False
        self._model = model
        self._handles = self._hook(model)
        self._describe_parameters()
        with self._guarded("the weights"):
            self._weigh(start_step)
        self._arm()
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
                self._count_tokens(int(tokens))
            at = self._current_step() if step is None else int(step)
            now, ready = time.time(), _to_host(values)
            if ready is None:
                self._feed.scalars(at, now, self._numbers(values))
            else:
                rest = self._numbers({n: v for n, v in values.items() if not _waited_for(v)})
                self._submit(lambda: self._feed.scalars(at, now, rest | ready()))

    def step(self, *, tokens: int | None = None, step: int | None = None) -> None:
        """End of a training step where there is no optimizer to tell; ``tokens`` seen in it.

        With an optimizer the steps are its own, and this only adds ``tokens``. ``step`` sets the
        number of the step just done.
        """
        if self.closed:
            return
        with self._guarded("step"):
            if tokens is not None:
                self._count_tokens(int(tokens))
            if self._optimizer is not None:
                self._release()
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
            self._release()
        self.closed = True
        self._observer.switch.armed = False
        for handle in self._handles:
            handle.remove()
        self._drains.shutdown(wait=True)
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return returned, (None,)  # a copy of a model that holds its recorder does not record

    # Steps

    def _hook(self, model: nn.Module) -> list[RemovableHandle]:
        handles = self._places.hook(self.anatomy, self._observer, self._failed)
        root = self.anatomy.modules.get("", model)
        roots = hook_root(model, root, self._observer, self._entered)
        self._blind = not roots  # TorchScript through and through: forwards are not seen
        handles += roots
        if self._optimizer is not None:
            handles.append(self._optimizer.register_step_pre_hook(self._before_step))
            handles.append(self._optimizer.register_step_post_hook(self._after_step))
        return handles

    def _entered(self, training: bool) -> None:
        """A forward begins."""
        if self.closed:
            return
        with self._guarded("a forward"):
            self._release()
            self._observer.started |= training
            if training and self._scaler is not None and self._observer.switch.armed:
                self._drop_if_skipped()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.closed or _within_a_step(optimizer):
            return
        self._skipping = False
        with self._guarded("optimizer step"), self._timed():
            self._release()
            self._skipping = _found_inf(optimizer)
            if not self._observer.switch.armed:
                return
            tally = self._observer.tally
            read_optimizer(optimizer, tally)
            for late in range(len(tally.optimizer), len(optimizer.param_groups)):
                reason = "it was added to the optimizer after attaching"
                self._cover_once(self.steps + 1, "group", f"group {late}", "optimizer", reason)
            if not self._evaluates(args, kwargs):
                self._watch.read_gradients(tally, getattr(optimizer, "grad_scale", None))
            self._watch.before_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.closed or _within_a_step(optimizer):
            return
        with self._guarded("optimizer step"):
            if self._skipping:
                self._scale = None  # its going down tells of this very skip
                self._skip()
            elif not self._observer.switch.armed:
                self._finish_step()
            else:
                with self._timed():
                    if self._evaluates(args, kwargs):
                        self._watch.read_gradients(self._observer.tally)
                    self._watch.after_step(self._observer.tally)
                self._finish_step()

    def _evaluates(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the step computes its gradients itself, through a closure."""
        return any(callable(value) for value in (*args[1:], kwargs.get("closure")))

    def _skip(self) -> None:
        """A gradient scaler found non-finite gradients: nothing was applied, nothing counts."""
        self._observer.tally.clear()
        self._observer.forget()
        self._feed.event(self.steps + 1, time.time(), "skipped", "the gradient scaler skipped it")

    def _drop_if_skipped(self) -> None:
        """Forget what belongs to a step that the scaler skipped: its scale has gone down."""
        scale = _scale_of(self._scaler)
        if scale is None:
            return
        before, self._scale = self._scale, scale.detach().clone()
        if before is None:
            return
        kept = scale >= before.to(scale.device)
        if scale.device.type != "cpu":
            self._observer.tally.keep_if(kept.to(self._observer.tally.device))
        elif not kept:
            self._skip()

    def _finish_step(self) -> None:
        self.steps += 1
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
            armed = bool(self._plan.record(self.steps + 1))
        with self._guarded("the next step"):
            self._compilation.poll()
            self._observer.forget()
            self._reading = 0.0
            if armed:
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

    def disown(self) -> None:
        """In a forked child: nothing is recorded here, whatever is called."""
        self.closed = True
        self._observer.switch.armed = False

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Scalars as numbers; what is none is told and left out."""
        numbers = {}
        for name, value in values.items():
            with self._guarded(f"log({name}=...)"):
                numbers[name] = float(value.detach() if isinstance(value, Tensor) else value)
        return numbers

    def _current_step(self) -> int:
        return self.steps + (self._observer.started or self.steps == 0)

    # From the tally to the feed

    def _device(self) -> torch.device:
        tensors = (t for t in self._watch.current() if t is not None and not t.is_meta)
        return next((t.device for t in tensors), torch.device("cpu"))

    def _new_tally(self) -> Tally:
        rows, parameters = len(self._places.rows), len(self._watch.names)
        groups = len(self._optimizer.param_groups) if self._optimizer is not None else 0
        lengths = {
            metric.name: parameters if metric.group == "gradient" else rows
            for metric in self._plan.custom
        }
        return Tally(rows, parameters, groups, lengths, self._device())

    def _drain(self) -> None:
        started = time.perf_counter()
        step, now = self.steps, time.time()
        self._discover(step)
        scale = _scale_of(self._scaler)
        if scale is not None:
            self._observer.tally.unscale(scale)
        drained, columns = self._observer.tally.drain(), np.array(self._columns, dtype=np.int64)
        cost = self._observer.cost + self._reading + time.perf_counter() - started
        on_host = self._observer.tally.on_host is not None

        def send() -> None:
            arrays = self._arrays(drained, columns)
            self._cover(step, arrays)
            self._feed.row(step, now, arrays, via="tally", tokens=self._tokens, cost=cost)

        self._held = send if on_host else lambda: self._submit(send)
        if self._optimizer is None or self._tokens_follow is False:
            self._release()
        elif self._tokens_follow is None:  # they may come after the first row, or never
            patience = threading.Timer(TOKEN_SECONDS, self._release)
            patience.daemon = True
            patience.start()

    def _release(self) -> None:
        """Send the row that waited for its tokens."""
        if self._held is None:
            return
        with self._sending:
            held, self._held = self._held, None
            if held is not None:
                self._tokens_follow = bool(self._tokens_follow)
                held()

    def _submit(self, work: Callable[[], None]) -> None:
        """Have ``work`` done by a thread that may wait for the device."""
        try:
            self._drains.submit(work)
        except RuntimeError:  # the interpreter is ending and starts no more threads
            work()

    def _count_tokens(self, tokens: int) -> None:
        self._tokens = max(self._tokens, 0) + tokens
        self._tokens_follow = True

    def _arrays(self, drained: Drained, columns: np.ndarray) -> dict[str, np.ndarray]:
        arrays = drained()
        merges = {metric.name: metric.merge for metric in self._plan.custom}
        for name in [name for name in arrays if name.startswith("custom:")]:
            value, weight = arrays[name].T
            divisor = weight if merges[name.removeprefix("custom:")] == "mean" else 1.0
            with np.errstate(invalid="ignore", divide="ignore"):
                arrays[name] = np.where(weight > 0, value / divisor, np.nan)
        return arrays | {
            "columns": columns,
            "branch": np.array(self._places.branch),
            "residual": np.array(self._places.residual),
            "numel": self._watch.numel(),
        }

    def _describe_parameters(self) -> None:
        groups: dict[int, int] = {}
        if self._optimizer is not None:
            for i, group in enumerate(self._optimizer.param_groups):
                groups |= {id(parameter): i for parameter in group["params"]}
        tensors = self._watch.current()
        described = [
            replace(parameter, group=groups.get(id(tensor), -1))
            for parameter, tensor in zip(self.anatomy.parameters, tensors, strict=True)
        ]
        self._feed.parameters([*described, *parts.parts_of(described, self.anatomy.layouts)])

    def _discover(self, step: int) -> None:
        """Tell the file of sites that were called for the first time."""
        known = set(self._columns)
        count = len(self._places.sites)
        self._tell_retyped(step)
        new = [row for row in self._observer.order if row < count and row not in known]
        if not new:
            return
        paths = [self._places.sites[row].path for row in self._observer.order if row < count]
        depths = {site.path: site for site in self.anatomy.ordered(paths).sites}
        if not self.anatomy.by_call_order:
            new.sort()
        first = not self._columns
        self._columns += new
        rows = self._places.rows
        self._feed.sites(
            [replace(depths[rows[r].path], dtype=_name(rows[r].dtypes[0])) for r in new]
        )
        if first:
            called = set(self._columns)
            for row, site in enumerate(self._places.sites):
                if row not in called:
                    speechless = rows[row].speechless
                    reason = "no floating tensor in its output" if speechless else _NEVER_CALLED
                    self._cover_once(step, "site", site.path, "", reason)

    def _tell_retyped(self, step: int) -> None:
        """Outputs came in another dtype than before, after ``model.to(dtype)`` for instance."""
        rows = [self._places.rows[row] for row in self._observer.retyped]
        self._observer.retyped.clear()
        if rows:
            was, now = rows[0].dtypes[0], rows[0].dtypes[-1]
            more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            message = f"{rows[0].path}{more}: {_name(now)} outputs, {_name(was)} before"
            self._feed.event(step, time.time(), "dtype", message)

    def _cover(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Say why something is missing from this row, once."""
        sums = {name: arrays["sums"][:, i] for i, name in enumerate(SUMS)}
        for i, site in enumerate(self._places.sites):
            row = self._places.rows[i]
            if sums["calls"][i] == 0:
                continue
            if row.expects_gradient and sums["gradient_calls"][i] == 0:
                reason = "its output required grad but no gradient came back to it"
                self._cover_once(step, "site", site.path, "activation_gradient", reason)
            if row.paired and sums["tokens"][i] == 0 and sums["count"][i] > 0:
                reason = "the block's input was overwritten in place or has another shape"
                self._cover_once(step, "site", site.path, "activation/angular_distance", reason)
            if site.role in _SUBLAYERS and self._places.residual[i] < 0 and not self._plan.light:
                reason = "the residual stream that it is added to is not known"
                self._cover_once(step, "site", site.path, "activation/branch_ratio", reason)
        self._cover_parameters(step, arrays["parameters"])

    def _cover_parameters(self, step: int, read: np.ndarray) -> None:
        trainable = np.array([parameter.trainable for parameter in self.anatomy.parameters])
        count, moved = (read[:, PARAMETER.index(name)] for name in ("count", "update_seen"))
        without = trainable & (count == 0)
        if without.any() and not (count > 0).any():
            reason = "no parameter had a gradient when the step was taken"
            self._cover_once(step, "parameter", "", "gradient", reason)
            return
        for i in np.flatnonzero(without):
            reason = "it had no gradient when the step was taken"
            self._cover_once(step, "parameter", self._watch.names[i], "gradient", reason)
        if self._optimizer is not None and not self._plan.light:
            for i in np.flatnonzero((count > 0) & (moved == 0)):
                reason = "the optimizer that was given does not hold it"
                self._cover_once(step, "parameter", self._watch.names[i], "update", reason)

    def _cover_once(self, step: int, kind: str, path: str, metric: str, reason: str) -> None:
        if (path, metric) not in self._told:
            self._told.add((path, metric))
            self._feed.coverage(step, kind, path, metric, reason)

    def _weigh(self, step: int) -> None:
        """Record the weights, on a schedule and an axis of their own."""
        if self._plan.light:
            return
        self._weighed = step
        taken = weights.collect(
            parts.with_parts(self.anatomy.parameters, self._watch.current(), self.anatomy.layouts)
        )
        self._feed.weights(step, time.time(), taken, via="histograms")

    # Never hurting the run

    def tell(self, kind: str, message: str) -> None:
        """Say something once in the log and in the file."""
        log.info("dynscope: %s", message)
        self._feed.event(self.steps, time.time(), kind, message)

    def _failed(self, path: str, reason: str, metric: str = "") -> None:
        """A site or parameter, or a metric there, cannot be read and goes quiet; the run goes on."""
        what = " ".join(filter(None, (metric, path))) or "the model"
        log.warning("dynscope: %s is no longer recorded: %s", what, reason)
        self._feed.event(self.steps + 1, time.time(), "failure", f"{what}: {reason}")
        self._cover_once(self.steps + 1, "failure", path, metric, reason)

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if ("", what) not in self._told:
                self._told.add(("", what))
                log.warning("dynscope: error in %s, the training goes on", what, exc_info=True)
                reason = f"error in {what}: {type(error).__name__}: {error}"
                self._feed.event(self.steps, time.time(), "failure", reason)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._reading += time.perf_counter() - started


_SUBLAYERS = ("attention", "cross_attention", "ffn", "mixer")
_NEVER_CALLED = "never called in training"

_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


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


def _within_a_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the hook that asks was called by a step that another step of ``optimizer`` made.

    A subclass whose ``step`` calls its parent's has its hooks called by both.
    """
    caller = sys._getframe(2)
    frame = caller.f_back
    while frame is not None:
        if frame.f_code is caller.f_code and optimizer in frame.f_locals.get("args", ())[:1]:
            return True
        frame = frame.f_back
    return False


def _scale_of(scaler: Any) -> Tensor | None:
    """The loss scale of a `GradScaler`, also before its first use; None where it is disabled."""
    scale, initial = getattr(scaler, "_scale", None), getattr(scaler, "_init_scale", None)
    if scale is None and initial is not None:
        return torch.tensor(float(initial), device="cpu")
    return scale if isinstance(scale, Tensor) else None


def _found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer is about to skip, where that is known without waiting."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _waited_for(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda" and value.numel() == 1


def _to_host(values: Mapping[str, Any]) -> Callable[[], dict[str, float]] | None:
    """A later look at values that an accelerator still computes; None when all are at hand."""
    waiting = {name: value.detach() for name, value in values.items() if _waited_for(value)}
    if not waiting:
        return None
    stacked = torch.stack([value.double().reshape(()) for value in waiting.values()])
    host = torch.empty_like(stacked, device="cpu", pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def ready() -> dict[str, float]:
        done.synchronize()
        return dict(zip(waiting, host.tolist(), strict=True))

    return ready
