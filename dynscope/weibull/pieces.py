"""Arrays of any shape and memory order, worked through in flat pieces."""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

_SIZE = 1 << 16  # elements: they stay in the cache


def pieces(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The elements in flat pieces, in the order of memory: views where that can be."""
    if values.size:
        each = np.nditer(
            values, flags=["external_loop", "buffered"], op_flags=["readonly", "aligned"],
            order="K", buffersize=_SIZE,
        )  # fmt: skip
        for piece in each:
            yield cast(NDArray[Any], piece)
