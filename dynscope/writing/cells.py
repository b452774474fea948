"""Values as a run file holds them: numbers of their column's type, texts of their column's width."""

from typing import Any

import numpy as np

from dynscope.runfile.schema import COLUMNS, encode, fit

_WIDTH = {c.path: int(c.dtype[1:]) for c in COLUMNS if c.dtype.startswith("S")}
_NUMBER = {c.path: np.dtype(c.dtype).type for c in COLUMNS if not c.dtype.startswith("S")} | {
    "step": np.int64,
    "weight_step": np.int64,
}


class Cells:
    """Makes cells, and gathers what of long texts goes into the file's overflow."""

    def __init__(self) -> None:
        self.overflow = b""  # not yet in the file
        self._long: dict[tuple[str, int], bytes] = {}

    def cell(self, path: str, value: Any, written: int) -> Any:
        """``value`` as the file will hold it in column ``path``; raises where it does not fit.

        ``written`` bytes of overflow are in the file.
        """
        if path in _WIDTH:
            return self._text(str(value), _WIDTH[path], written)
        return _NUMBER[path](value) if path in _NUMBER else value

    def _text(self, text: str, width: int, written: int) -> bytes:
        if (text, width) in self._long:
            return self._long[text, width]
        cell, rest = fit(encode(text), width, written + len(self.overflow))
        self.overflow += rest
        if rest:
            self._long[text, width] = cell
        return cell
