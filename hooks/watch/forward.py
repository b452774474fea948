"""The hooks on a live module and on its outputs: they hand tensors to an `Observer`.

A hook never replaces an output and never keeps a tensor. Module full backward hooks are never
used: they break in-place code. Gradients of outputs come through tensor hooks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dynscope.hooks.tensor.private import in_transform, inside_backward, is_exporting, plainly
from dynscope.hooks.tensor.tensors import floating, observable, primary, version
from dynscope.hooks.watch.observation import BACKWARD, FORWARD, INPUT, Observer
from dynscope.hooks.watch.padding import Verdict


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
        self.paired, self._part = place.paired, place.part
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
                with plainly():
                    self._eager(args, *rest)
            except Exception as error:
                self._observer.fail(self._row, error)

    def _eager(self, args: Any, *rest: Any) -> None:
        observer, row = self._observer, self._row
        output = primary(rest[-1])
        if output is None:
            observer.rows[row].speechless = True
            return
        if not observable(output):
            observer.unreadable(row, output)
            return
        reference = self._reference(output, args, *rest)
        if reference is not None and self.versions.get(id(reference), -1) not in (
            -1, version(reference),
        ):  # fmt: skip
            reference = None  # overwritten in place since the module was entered
        part = self._part
        observer.observe(
            row, FORWARD, part(output.detach()),
            part(reference.detach()) if reference is not None else None,
            seen=output if observer.rows[row].stream is None else None,
            mask=(mask := observer.verdict(FORWARD)),
            aside=observer.aside(),
        )  # fmt: skip
        # Reentrant checkpointing sends gradients through the recomputed output only.
        if self.backward and output.requires_grad:
            observer.rows[row].expects_gradient = True
            if inside_backward():
                mask = observer.verdict(BACKWARD)  # recomputed
            output.register_hook(GradientHook(observer, row, mask))

    def _trace(self, args: Any, *rest: Any) -> None:
        output = primary(rest[-1])
        if output is None or not torch.is_grad_enabled() or is_exporting():
            return
        reference = self._reference(output, args, *rest)
        observe, where, part = torch.ops.dynscope.observe, self.where, self._part
        padding = self._observer.padding
        mask = None if padding is None else padding.given
        if reference is not None:
            reference = part(reference.detach())
        observe(part(output.detach()), reference, mask, where, FORWARD)
        if self.backward and output.requires_grad:
            output.register_hook(lambda g: observe(part(g.detach()), None, mask, where, BACKWARD))

    def _reference(self, output: Tensor, args: Any, *rest: Any) -> Tensor | None:
        """What the output is compared with: the first input of its shape (masks may come first)."""
        if not self.paired:
            return None
        return next((x for x in floating((args, rest[0])) if x.shape == output.shape), None)


class GradientHook:
    """Tensor hook on a site's output."""

    def __init__(self, observer: Observer, row: int, mask: Verdict) -> None:
        self._observer, self._row, self._mask = observer, row, mask

    def __call__(self, gradient: Tensor) -> None:
        if self._observer.switch.armed:
            try:
                with plainly():
                    self._eager(gradient)
            except Exception as error:
                self._observer.fail(self._row, error)

    def _eager(self, gradient: Tensor) -> None:
        place = self._observer.rows[self._row]
        seen = gradient if place.stream is None else None
        part = place.part(gradient.detach())
        self._observer.observe(self._row, BACKWARD, part, seen=seen, mask=self._mask)


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
            if x is not None and torch.is_grad_enabled() and not is_exporting():
                padding = self._observer.padding
                mask = None if padding is None else padding.given
                torch.ops.dynscope.observe(x.detach(), None, mask, self.where, INPUT)
        elif self._observer.training_pass():
            try:
                with plainly():
                    x = primary((args, kwargs))
                    if x is not None:
                        observer, row = self._observer, self._row
                        real, aside = observer.verdict(INPUT), observer.aside()
                        observer.observe(row, INPUT, x.detach(), mask=real, aside=aside)
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
            with plainly():
                self._hook.versions = {id(x): version(x) for x in floating((args, kwargs))}
        except Exception:
            self._hook.versions = {}  # the hook itself will meet the same inputs and tell


class RootHook(_Hook):
    """Pre-hook and hook of a module that may be called from outside: the model or a part of it.

    The outermost of them tells training passes from the others. ``is_model``: nothing is around it.
    """

    def __init__(
        self,
        observer: Observer,
        on_enter: Callable[[bool, nn.Module, Any, Any], None],
        *,
        module: nn.Module,
        entering: bool,
        is_model: bool,
    ) -> None:
        self._observer, self._current, self._on_enter = observer, observer.current, on_enter
        self._entering, self._is_model = entering, is_model
        padding = observer.padding
        self._mask_at = -1 if padding is None else padding.position(module)

    def __call__(self, module: nn.Module, *called: Any) -> None:
        if torch.compiler.is_compiling():
            self._trace(*called[:2])
            return
        if in_transform():
            return  # a transform (vmap, jvp, grad) is no pass of the training
        current = self._current
        if not self._entering:
            if current.module is module:
                current.module = current.training = None
                if self._observer.padding is not None:
                    self._observer.padding.leave()
        elif (current.module is None or self._is_model) and not inside_backward():
            training = torch.is_grad_enabled()
            self._on_enter(training, module, *called[:2])
            current.module, current.training = module, training

    def _trace(self, args: Any, kwargs: Any) -> None:
        """The model is compiled as a whole: what it finds as its mask goes along in the graph."""
        padding = self._observer.padding
        if padding is None or not self._is_model or not self._observer.switch.armed:
            return
        padding.given = padding.found(self._mask_at, args, kwargs) if self._entering else None
