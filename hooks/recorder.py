"""The recorder: what `attach` returns. It owns the hooks, the tally, the schedule and the feed."""

import contextlib
import logging
import threading
import time
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
from dynscope.hooks.custom import SiteMetric
from dynscope.hooks.fused import Compilation
from dynscope.hooks.measure import Measure
from dynscope.hooks.observation import Observer
from dynscope.hooks.parameters import ParameterWatch, read_optimizer
from dynscope.hooks.places import Places, hook_root
from dynscope.hooks.schedule import Schedule
from dynscope.hooks.tally import Drained, Tally
from dynscope.tally import SUMS

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
        self._compilation = Compilation()
        measure = Measure(self._compilation, light=plan.light, full=plan.full)
        self._watch = ParameterWatch(
            anatomy, measure, plan.custom, self._failed, light=plan.light, full=plan.full
        )
        self._told: set[tuple[str, str]] = set()
        self._columns: list[int] = []  # rows of the tally in the order of the file's sites
        self._observer = Observer(
            places.rows, self._new_tally(), measure, plan.custom, self._failed,
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
        self._handles = self._hook(model)
        self.closed = False
        self._describe_parameters()
        self._weigh(start_step)
        self._arm()

    # What the user calls

    def log(self, *, step: int | None = None, **values: float | Tensor) -> None:
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
                numbers = {name: _number(value) for name, value in values.items()}
                self._feed.scalars(at, now, numbers)
            else:
                self._drains.submit(lambda: self._feed.scalars(at, now, ready()))

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

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of a model does not record

    # Steps

    def _hook(self, model: nn.Module) -> list[RemovableHandle]:
        handles = self._places.hook(self.anatomy, self._observer, self._failed)
        handles += hook_root(model, self._observer, self._entered)
        if self._optimizer is not None:
            handles.append(self._optimizer.register_step_pre_hook(self._before_step))
            handles.append(self._optimizer.register_step_post_hook(self._after_step))
        return handles

    def _entered(self) -> None:
        """A training forward begins."""
        self._observer.started = True
        self._release()
        if self._scaler is not None and self._observer.switch.armed:
            with self._guarded("scaler"):
                self._drop_if_skipped()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._observer.switch.armed:
            return
        self._skipping = False
        with self._guarded("optimizer step"), self._timed():
            self._release()
            tally = self._observer.tally
            self._skipping = _found_inf(optimizer)
            read_optimizer(optimizer, tally)
            if not self._evaluates(args, kwargs):
                self._watch.read_gradients(tally, getattr(optimizer, "grad_scale", None))
            self._watch.before_step()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with self._guarded("optimizer step"):
            if not self._observer.switch.armed:
                self._finish_step()
            elif self._skipping:
                self._skip()
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
        scale = getattr(self._scaler, "_scale", None)
        if scale is None:
            return
        if self._scale is not None:
            self._observer.tally.keep_if((scale >= self._scale).to(self._observer.tally.device))
        self._scale = scale.detach().clone()

    def _finish_step(self) -> None:
        self.steps += 1
        if self._observer.switch.armed:
            self._drain()
        if self._plan.weigh(self.steps):
            self._weigh(self.steps)
        self._observer.started = False
        self._arm()

    def _arm(self) -> None:
        """Decide whether the next step is recorded."""
        self._compilation.poll()
        armed = bool(self._plan.record(self.steps + 1))
        if armed and self._device() != self._observer.tally.device:
            self._observer.tally = self._new_tally()
        self._observer.forget()
        self._reading = 0.0
        self._observer.switch.armed = armed
        if armed and self._optimizer is None:
            self._watch.before_step()

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
        drained, columns = self._observer.tally.drain(), np.array(self._columns, dtype=np.int64)
        cost = self._observer.cost + self._reading + time.perf_counter() - started
        on_host = self._observer.tally.on_host is not None

        def send() -> None:
            arrays = self._arrays(drained, columns)
            self._cover(step, arrays)
            self._feed.row(step, now, arrays, via="tally", tokens=self._tokens, cost=cost)

        self._held = send if on_host else lambda: _ignore(self._drains.submit(send))
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
            "numel": self._numel,
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
        self._numel = np.array([parameter.numel for parameter in described])
        self._feed.parameters([*described, *parts.parts_of(described, self.anatomy.layouts)])

    def _discover(self, step: int) -> None:
        """Tell the file of sites that were called for the first time."""
        known = set(self._columns)
        count = len(self._places.sites)
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
        self._feed.sites([replace(depths[rows[r].path], dtype=rows[r].dtype) for r in new])
        if first:
            called = set(self._columns)
            for row, site in enumerate(self._places.sites):
                if row not in called:
                    self._cover_once(step, "site", site.path, "", "never called in training")

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

    def _failed(self, path: str, reason: str) -> None:
        """A site or parameter that could not be read goes quiet; the run goes on."""
        log.warning("dynscope: %s is no longer recorded: %s", path or "the model", reason)
        self._feed.event(self.steps + 1, time.time(), "failure", f"{path}: {reason}")
        self._cover_once(self.steps + 1, "failure", path, "", reason)

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


def _found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer is about to skip, where that is known without waiting."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())


def _ignore(_: object) -> None:
    """Nobody waits for the result."""


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _to_host(values: Mapping[str, Any]) -> Callable[[], dict[str, float]] | None:
    """A later look at values that an accelerator still computes; None when all are at hand."""
    waiting = {
        name: value.detach()
        for name, value in values.items()
        if isinstance(value, Tensor) and value.device.type == "cuda"
    }
    if not waiting:
        return None
    stacked = torch.stack([value.double().reshape(()) for value in waiting.values()])
    host = torch.empty_like(stacked, device="cpu", pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    rest = {name: _number(value) for name, value in values.items() if name not in waiting}

    def ready() -> dict[str, float]:
        done.synchronize()
        return rest | dict(zip(waiting, host.tolist(), strict=True))

    return ready
