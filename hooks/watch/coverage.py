"""What is missing from a row, and why."""

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from dynscope.analysis.sums import OPTIMIZER, PARAMETER, SUMS
from dynscope.hooks.model.anatomy import Anatomy
from dynscope.hooks.telling.telling import Telling
from dynscope.hooks.tensor.private import LOST
from dynscope.hooks.watch.places import Places

_SUBLAYERS = ("attention", "cross_attention", "ffn", "mixer")

_Gaps = Iterator[tuple[str, str]]


class Coverage:
    """Tells each gap once. ``updates``: an optimizer was given whose updates are followed."""

    def __init__(
        self,
        anatomy: Anatomy,
        places: Places,
        telling: Telling,
        *,
        light: bool,
        full: bool,
        updates: bool,
    ) -> None:
        self._parameters, self._places = anatomy.parameters, places
        self._missing = telling.missing
        self._light, self._full, self._updates = light, full, updates

    def uncalled(self, step: int, called: Collection[int]) -> None:
        """Sites that the first recorded step did not call."""
        for row, site in enumerate(self._places.sites):
            if row not in called:
                speechless = self._places.rows[row].speechless
                reason = "no floating tensor in its output" if speechless else _NEVER_CALLED
                self._missing(step, "site", site.path, "", reason)

    def groups(self, step: int, known: int, now: int) -> None:
        """Optimizer groups that the file has no place for: it has ``known`` of the ``now``."""
        for late in range(known, now):
            reason = "it was added to the optimizer after attaching"
            self._missing(step, "group", f"group {late}", "optimizer", reason)

    def row(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """What the row that a drained tally becomes will lack."""
        for name, lost in LOST.items():
            self._missing(step, "torch", name, "", f"this torch has no such name: {lost}")
        sums = {name: arrays["sums"][:, i] for i, name in enumerate(SUMS)}
        for i, site in enumerate(self._places.sites):
            if sums["calls"][i] != 0:
                for metric, reason in self._of_site(i, sums):
                    self._missing(step, "site", site.path, metric, reason)
        for name, metric, reason in self._of_parameters(arrays["parameters"]):
            self._missing(step, "parameter", name, metric, reason)
        for metric, reason in (
            *self._nowhere(sums, arrays["top"]),
            *self._of_clipping(arrays["parameters"]),
            *self._of_optimizer(arrays["optimizer"]),
        ):
            self._missing(step, "metric", "", metric, reason)

    def _of_site(self, i: int, sums: Mapping[str, np.ndarray]) -> _Gaps:
        """Metric and reason, of a site that was called."""
        row = self._places.rows[i]
        if row.expects_gradient and sums["gradient_calls"][i] == 0:
            yield (
                "activation_gradient",
                "its output required grad but no gradient came back to it",
            )
        elif row.expects_gradient and sums["gradient_calls"][i] < sums["calls"][i]:
            yield (
                "activation_gradient/n_calls",
                "some of its calls got no gradient: they count, but nothing was trained on them",
            )
        if row.paired and sums["tokens"][i] == 0 and sums["count"][i] > 0:
            yield (
                "activation/angular_distance",
                "the block's input was overwritten in place or has another shape",
            )
        sublayer = self._places.sites[i].role in _SUBLAYERS
        if sublayer and self._places.residual[i] < 0 and not self._light:
            yield (
                "activation/branch_ratio",
                "the residual stream that it is added to is not known",
            )

    def _nowhere(self, sums: Mapping[str, np.ndarray], top: np.ndarray) -> _Gaps:
        """Metrics that no recorded site has, and why."""
        called = [i for i in range(len(self._places.sites)) if sums["calls"][i] != 0]
        if not called or self._light:
            return
        if not any(self._places.rows[i].paired for i in called):
            for metric in ("angular_distance", *(("cosine_to_input",) if self._full else ())):
                yield f"activation/{metric}", "no block is among the recorded sites"
        if not any(self._places.sites[i].role in _SUBLAYERS for i in called):
            yield "activation/branch_ratio", "no sublayer of a block is among the recorded sites"
        found = top[called][np.isfinite(top[called][..., 0])]
        if len(found) and (found[:, 2] < 0).all():
            yield "massive/token", "no recorded output has an axis of tokens"
        asked = any(self._places.rows[i].expects_gradient for i in called)
        if not asked and not sums["gradient_calls"][called].any():
            yield "activation_gradient", "no recorded output required grad"

    def _of_clipping(self, read: np.ndarray) -> _Gaps:
        seen, count = (read[:, PARAMETER.index(name)] for name in ("before_clip_seen", "count"))
        if (count > 0).any() and not seen.any() and not self._light:
            yield "gradient/norm_before_clip", _NO_CLIPPING

    @staticmethod
    def _of_optimizer(settings: np.ndarray) -> _Gaps:
        if not len(settings):
            yield "optimizer", "no optimizer was given"
            return
        for name in np.array(OPTIMIZER)[np.isnan(settings).all(0)]:
            yield f"optimizer/{name}", "the optimizer has no such setting"

    def _of_parameters(self, read: np.ndarray) -> Iterator[tuple[str, str, str]]:
        """Name, metric and reason."""
        trainable = np.array([parameter.trainable for parameter in self._parameters])
        count, moved = (read[:, PARAMETER.index(name)] for name in ("count", "update_seen"))
        without = trainable & (count == 0)
        if without.any() and not (count > 0).any():
            yield "", "gradient", "no parameter had a gradient when the step was taken"
            return
        for i in np.flatnonzero(without):
            reason = "it had no gradient when the step was taken"
            yield self._parameters[i].name, "gradient", reason
        if self._updates and not self._light:
            for i in np.flatnonzero((count > 0) & (moved == 0)):
                reason = "the optimizer that was given does not hold it"
                yield self._parameters[i].name, "update", reason


_NEVER_CALLED = "never called in training"
_NO_CLIPPING = (
    "no call of clip_grad_norm_ or clip_grad_value_ was seen (clipping by other means is told by "
    "scope.before_clip())"
)
