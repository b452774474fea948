"""A model as it is built now: what is observed of it, and the hooks that observe."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from dynscope.hooks.model.anatomy import Anatomy
from dynscope.hooks.recording import columns
from dynscope.hooks.telling.telling import Telling
from dynscope.hooks.tensor.custom import OwnMetrics
from dynscope.hooks.tensor.measure import Measure
from dynscope.hooks.tensor.private import ScriptModule, has_compiled
from dynscope.hooks.tensor.tally import Drained, Tally
from dynscope.hooks.training import parts, weights
from dynscope.hooks.training.optimizer import Optimizers
from dynscope.hooks.training.parameters import ParameterWatch
from dynscope.hooks.watch.coverage import Coverage
from dynscope.hooks.watch.observation import Observer
from dynscope.hooks.watch.padding import Padding
from dynscope.hooks.watch.places import Places, hook_root
from dynscope.writing.feed import Feed

OnEnter = Callable[[bool, nn.Module, Any, Any], None]


@dataclass(frozen=True)
class Tools:
    """What every survey of a recorder works with."""

    feed: Feed
    telling: Telling
    measure: Measure
    own: OwnMetrics
    optimizers: Optimizers
    groups: int  # of the optimizers, as many as the file has room for
    light: bool
    full: bool
    padding: Padding | None = None


class Survey:
    """The anatomy of ``model``, its rows, what reads its parameters, and the file's columns.

    Made anew when modules are added, replaced or removed. The file's columns go by path and name,
    so that what stays goes on where it was.
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, places: Places, tools: Tools, on_enter: OnEnter
    ) -> None:
        self.anatomy, self.places = anatomy, places
        self._model, self._tools = model, tools
        t, light = tools, tools.light
        self.watch = ParameterWatch(anatomy, t.measure, t.own, t.telling, light=light, full=t.full)
        self.observer = Observer(
            places.rows, self.new_tally(), t.measure, t.own, t.telling,
            backward=not light, padding=t.padding,
        )  # fmt: skip
        followed = bool(t.optimizers) and not light
        self.coverage = Coverage(
            anatomy, places, t.telling, light=light, full=t.full, updates=followed
        )
        self._columns = columns.Columns(anatomy, places, t.feed)
        self._built = _build(model)
        self._described = self._told_uncalled = False
        self._handles: list[RemovableHandle] = []
        self.blind = False  # TorchScript through and through: forwards are not seen
        self._hook(on_enter)

    def _hook(self, on_enter: OnEnter) -> None:
        root = self.anatomy.modules.get("", self._model)
        self._handles = self.places.hook(self.anatomy, self.observer, self._tools.telling)
        roots = hook_root(self._model, root, self.observer, on_enter)
        self.blind = not roots
        self._handles += roots

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()

    def outdated(self) -> bool:
        """Whether modules or parameters were added, replaced or removed since."""
        return _build(self._model) != self._built

    def changes_to(self, later: "Survey") -> str:
        """What was added, replaced or removed, in a few words."""
        before, after = self.anatomy.modules, later.anatomy.modules
        paths = [p for p in (*before, *after) if p and before.get(p) is not after.get(p)]
        outermost = [p for p in dict.fromkeys(paths) if p.rpartition(".")[0] not in paths]
        names = ", ".join(outermost[:4]) + (" and more" if len(outermost) > 4 else "")
        return f"{names or 'parameters'}: added, replaced or removed after attaching, followed from here"

    # Parameters

    def describe(self) -> None:
        """Tell the file of the parameters, as soon as their shapes are known."""
        tensors = self.watch.current()
        if self._described or any(t is not None and is_lazy(t) for t in tensors):
            return
        self._described = True
        self._tools.feed.parameters(
            columns.parameters(self.anatomy, tensors, self._tools.optimizers), anew=True
        )

    def weigh(self) -> dict[str, np.ndarray]:
        """What the fits of the weights need."""
        a = self.anatomy
        return weights.collect(parts.with_parts(a.parameters, self.watch.current(), a.layouts))

    @property
    def described(self) -> bool:
        """Whether the file knows the parameters: without, it has no columns for them."""
        return self._described

    # Rows

    def device(self) -> torch.device:
        tensors = (t for t in self.watch.current() if t is not None and not t.is_meta)
        return next((t.device for t in tensors), torch.device("cpu"))

    def new_tally(self) -> Tally:
        rows, parameters = len(self.places.rows), len(self.watch.names)
        return Tally(
            rows,
            parameters,
            self._tools.groups,
            self._tools.own.lengths(rows, parameters),
            self.device(),
        )

    def discover(self, step: int) -> str:
        """Tell the file of sites that were called for the first time; returns what to say of those
        whose output came in another dtype than before."""
        observer = self.observer
        retyped = [self.places.rows[row] for row in observer.retyped]
        observer.retyped.clear()
        self._columns.extend(observer.order)
        if not self._told_uncalled:
            self._told_uncalled = True
            self.coverage.uncalled(step, set(self._columns.rows))
        return columns.retyped(retyped) if retyped else ""

    def arrays(self) -> Callable[[Drained], dict[str, np.ndarray]]:
        """Makes a row's arrays of a drained tally, with the columns that the file has now."""
        rows = self._columns.array()

        def of(drained: Drained) -> dict[str, np.ndarray]:
            return self._tools.own.merged(drained()) | {
                "columns": rows,
                "branch": np.array(self.places.branch),
                "residual": np.array(self.places.residual),
                "numel": self.watch.numel(),
            }

        return of


def _build(model: nn.Module) -> list[tuple[int, int]]:
    """Every module with the number of parameters that it holds itself."""
    modules: Iterable[nn.Module] = model.modules()
    return [(id(m), len(m._parameters)) for m in modules if not isinstance(m, ScriptModule)]


def retrace() -> bool:
    """Have what was compiled before compiled anew: hooks added since would never fire in it."""
    compiled = has_compiled()
    if compiled:
        torch.compiler.reset()
    return compiled
