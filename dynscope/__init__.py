"""dynscope: training-dynamics diagnostics for PyTorch.

`attach` records a training run into one file, `load` reads it, `dynscope report` draws it.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from dynscope.errors import DynscopeError, InputError
from dynscope.site import Parameter, Site

if TYPE_CHECKING:
    from dynscope.catalogue import Metric
    from dynscope.hooks import Anatomy, Recorder, SiteMetric, attach, every, log_spaced
    from dynscope.reading.run import Run, load

__all__ = [
    "Anatomy",
    "DynscopeError",
    "InputError",
    "Metric",
    "Parameter",
    "Recorder",
    "Run",
    "Site",
    "SiteMetric",
    "attach",
    "every",
    "load",
    "log_spaced",
]

try:
    __version__ = version("dynscope")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "unknown"

# Imported when first asked for: torch takes seconds, h5py and xarray a good part of one.
_LIVE = frozenset({"Anatomy", "Recorder", "SiteMetric", "attach", "every", "log_spaced"})
_READING = {
    "Run": "dynscope.reading.run",
    "load": "dynscope.reading.run",
    "Metric": "dynscope.catalogue",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LIVE:
        try:
            return getattr(import_module("dynscope.hooks"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "torch":
                raise
            raise InputError(
                f"dynscope.{name} needs torch, which is not installed: "
                "pip install 'dynscope[torch]'"
            ) from None
    if name in _READING:
        return getattr(import_module(_READING[name]), name)
    raise AttributeError(f"module 'dynscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
