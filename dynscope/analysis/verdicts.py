"""What a Weibull shape says of a matrix, in words, and the limits within which it may be read.

Classes and band: Weibull weight magnitudes, arXiv 2605.18898. How to read it: docs/weibull.md.
"""

import re
from dataclasses import dataclass
from math import isfinite

from dynscope.weibull import HALF_NORMAL_K

FFN_ROLES = frozenset({"ffn", "gate", "up", "gate_up", "down", "in", "out", "experts"})
"""Roles for which the band was published; the paper's attention outputs lie on both sides of it."""

BAND = (1.186, 1.204)
"""Where the k of trained FFN matrices lies (middle 80 %)."""

UNIFORM_K = 1.375119
"""Population value of uniform weights, PyTorch's default initialization of Linear and Conv."""

NOT_READ = "not read"
"""The word of a k that nothing published can be held against."""

UNTRAINED = {"Gaussian": HALF_NORMAL_K, "uniform": UNIFORM_K}
"""The words of shapes that initialization makes, and their k."""

MILD, STRONG = 1.18, 0.95
"""Below these a query or key matrix shows mild and strong selection."""

ENOUGH = 1_000_000
"""Weights below which a k is too uncertain for a band 0.018 wide."""

EDGE = 0.003
"""As near to an edge of the band as two protocols disagree by: neither in nor out."""

_SELECTION = frozenset({"q", "k"})
_R2 = 0.95
_LIKE = 0.0015  # as near to the k of untrained weights as to be taken for it


@dataclass(frozen=True)
class Verdict:
    """``word`` is short and may stand in a table; ``note`` says in a sentence what limits it."""

    word: str
    note: str = ""

    @property
    def reads_band(self) -> bool:
        """Whether the matrices were read against the band, whatever came out."""
        return self.word not in ("no fit", "not Weibull", "too few weights", "no band", NOT_READ)


def weight_class(role: str) -> str:
    """ "transmission" (FFN matrices and the attention's output), "selection" (q, k) or ""."""
    if role in _SELECTION:
        return "selection"
    return "transmission" if role in FFN_ROLES or role == "o" else ""


def stored(quantized: str) -> str:
    """What quantized storage ("Q4_1, Q8_0", the commonest first) means for a k, or ""."""
    bits = re.match(r"(?:I?Q|TQ|MXFP)(\d)", quantized)
    width = f" ({bits.group(1)}-bit)" if bits else ""
    told = f"stored in {quantized}{width}: the k of what is stored, not of what was trained"
    return told if quantized else ""


def bands_hold(protocol: str) -> bool:
    """Whether fits of this protocol (`dynscope.weibull.WeibullFit.protocol`) may be read against bands.

    All that was published is of the middle 80 %: other parts of the same weights have another k.
    """
    return not protocol.endswith(("mid_90", "full_range"))


def verdict(
    role: str,
    k: float,
    k_stderr: float,
    n: int,
    r2: float,
    quantized: str = "",
    protocol: str = "",
) -> Verdict:
    """What a fit, or a fit pooled over layers, says of weights of this role.

    ``n`` counts the weights behind the fit, ``quantized`` is how they are stored ("Q4_K") or "".
    Only FFN matrices are read against the band, and only with `ENOUGH` weights.
    """
    note = stored(quantized)
    if not isfinite(k):
        return Verdict("no fit", note)
    if re.match(r"Q\d_0", quantized):
        moved = "this storage rounds small weights to zero, which alone moves k by 0.02 to 0.3"
        return Verdict(NOT_READ, _and(moved, note))
    if not bands_hold(protocol):
        other = f"fitted by {protocol}, and all bands are of the middle 80 %"
        return Verdict(NOT_READ, _and(other, note))
    if not r2 >= _R2:
        return Verdict("not Weibull", _and(f"R² below {_R2}: the shape means little", note))
    if n < ENOUGH:
        few = "fewer than a million weights, pooled or not: too uncertain for a band"
        return Verdict("too few weights", _and(few, note))
    error = 1.96 * k_stderr if isfinite(k_stderr) else 0.0
    for word, anchor in UNTRAINED.items():
        if abs(k - anchor) <= max(_LIKE, error):
            return Verdict(word, _and("cannot be told from untrained weights by its shape", note))
    if role in _SELECTION:
        return Verdict(_selection(k), note)
    if role in FFN_ROLES:
        return Verdict(_place(k, max(EDGE, error)), note)
    return Verdict("no band", _and("the band was published for FFN matrices only", note))


def _selection(k: float) -> str:
    if k >= BAND[0]:
        return "no selection"
    if k >= MILD:
        return "below the band"
    return f"below the band: {'mild' if k >= STRONG else 'strong'} selection"


def _place(k: float, near: float) -> str:
    for edge, name in zip(BAND, ("lower", "upper"), strict=True):
        if abs(k - edge) <= near:
            return f"at the band's {name} edge"
    if BAND[0] < k < BAND[1]:
        return "in the band"
    return "below the band" if k < BAND[0] else "above the band"


def _and(first: str, second: str) -> str:
    return f"{first}; {second}" if second else first
