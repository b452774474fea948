"""A metric of the user's own: a function of a tensor, a name, and how its values merge."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dynscope.catalogue import PARAMETER, SITE, Metric
from dynscope.errors import InputError
from dynscope.hooks.telling.telling import Telling, named
from dynscope.hooks.tensor.tally import Tally

_AXES = {"activation": SITE, "activation_gradient": SITE, "gradient": PARAMETER}


@dataclass(frozen=True)
class SiteMetric:
    """A quantity that ``compute`` makes of a tensor, recorded beside the catalogue's.

    ``name`` is ``activation/...`` (``compute`` gets a site's output), ``activation_gradient/...``
    (its gradient) or ``gradient/...`` (a parameter's gradient). ``compute`` runs without autograd
    and returns a 0-d tensor or a number; on an accelerator it must not wait for the device. Calls
    of one step are merged by ``merge``: their mean, sum or largest value. Raises `InputError` for
    a name of another group.

    >>> SiteMetric("activation/near_zero", lambda x: (x.abs() < 1e-3).float().mean())
    """

    name: str
    compute: Callable[[Tensor], Tensor | float]
    merge: Literal["mean", "sum", "max"] = "mean"
    unit: str = "1"
    definition: str = ""
    reading: str = ""
    source: str = "recorded by the user"

    def __post_init__(self) -> None:
        if self.group not in _AXES:
            raise InputError(
                f"Metric name {self.name!r} does not fit: a metric of your own is called "
                f"{', '.join(f'{group}/...' for group in _AXES)}"
            )

    @property
    def group(self) -> str:
        return self.name.split("/", 1)[0]

    @property
    def metric(self) -> Metric:
        """Its catalogue entry, stored in the run file."""
        return Metric(
            self.name, _AXES[self.group], self.unit, self.definition, self.reading, self.source
        )

    def add(self, tally: Tally, row: int, x: Tensor) -> None:
        """Merge the value of ``x`` into ``row``."""
        cell = tally.custom(self.name)[row]
        value = torch.as_tensor(self.compute(x), dtype=torch.float64, device=cell.device)
        first = cell[1] == 0
        merged = torch.maximum(cell[0], value) if self.merge == "max" else cell[0] + value
        cell[0] = torch.where(first, value, merged)
        cell[1] += 1


class OwnMetrics:
    """The user's metrics; where one raises it goes quiet at that place, and only there."""

    def __init__(self, metrics: Sequence[SiteMetric], telling: Telling) -> None:
        self._metrics, self._telling = tuple(metrics), telling
        self._quiet: set[tuple[str, int]] = set()

    def put(self, group: str, tally: Tally, row: int, path: str, x: Tensor) -> None:
        """The values that the metrics of ``group`` have for ``x``, in place of those of ``row``."""
        for metric in self._metrics:
            if metric.group == group:
                tally.custom(metric.name)[row] = 0
        self.add(group, tally, row, path, x)

    def add(self, group: str, tally: Tally, row: int, path: str, x: Tensor) -> None:
        """Merge the values that the metrics of ``group`` have for ``x`` into ``row``."""
        for metric in self._metrics:
            if metric.group != group or (metric.name, row) in self._quiet:
                continue
            try:
                metric.add(tally, row, x)
            except Exception as error:
                self._quiet.add((metric.name, row))
                self._telling.failed(path, named(error), metric.name)

    def lengths(self, rows: int, parameters: int) -> dict[str, int]:
        """Places of each metric in a tally: its ``rows`` or its ``parameters``."""
        return {
            metric.name: parameters if metric.group == "gradient" else rows
            for metric in self._metrics
        }

    def merged(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A drained tally's ``arrays`` with values in place of the metrics' values and weights."""
        values = {}
        for metric in self._metrics:
            value, weight = arrays[f"custom:{metric.name}"].T
            divisor = weight if metric.merge == "mean" else 1.0
            with np.errstate(invalid="ignore", divide="ignore"):
                values[f"custom:{metric.name}"] = np.where(weight > 0, value / divisor, np.nan)
        return {**arrays, **values}
