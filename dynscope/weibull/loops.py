"""The compiled loops, for those who have enough to do for them."""

import importlib
from functools import cache
from types import ModuleType

WORTH_IT = 1_000_000
"""As many values must a process have had to count before numba is imported for more."""

_counted = 0


def loops(values: int = 0) -> ModuleType | None:
    """`dynscope.weibull.compiled` where numba is installed and so many ``values`` more make it worth it."""
    global _counted
    _counted += values
    return compiled() if _counted >= WORTH_IT else None


@cache
def compiled() -> ModuleType | None:
    try:
        return importlib.import_module("dynscope.weibull.compiled")
    except Exception:  # numba is not there, or has no place to keep what it compiles
        return None
