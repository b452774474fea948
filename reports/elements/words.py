"""How numbers, roles and names are spelled on a page."""

from collections.abc import Sequence
from html import escape
from math import floor, isfinite, isnan, log10

ROLE_NAMES = {
    "block": "residual stream",
    "attention": "attention",
    "cross_attention": "cross-attention",
    "ffn": "FFN",
    "mixer": "mixer",
    "embed": "embedding",
    "qkv": "QKV",
    "gate_up": "gate and up",
}

_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def number(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits: 1,234, 0.0213, 3.1×10⁻⁷; "–" when missing."""
    if isnan(value):
        return "–"
    if not isfinite(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    size = floor(log10(abs(value)))
    if size >= 6 or size < -3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return _minus(f"{_trim(mantissa)}×10{str(int(exponent)).translate(_SUPERSCRIPT)}")
    return _minus(_trim(f"{value:,.{max(digits - 1 - size, 0)}f}"))


def integer(value: int) -> str:
    return _minus(f"{value:,}")


def percent(share: float) -> str:
    return f"{number(share * 100, 2)} %"


def size(count: int) -> str:
    """Bytes for a person: 812 kB, 1.8 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} bytes"


def count(amount: int, noun: str) -> str:
    """``amount`` and its noun, in the plural unless there is one."""
    return f"{integer(amount)} {plural(amount, noun)}"


def plural(amount: int, noun: str) -> str:
    """``noun`` as it is said of ``amount`` of them."""
    if amount == 1:
        return noun
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def parameters(amount: int) -> str:
    """A number of weights: 24.5 M, 1.2 B."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= scale:
            return f"{amount / scale:.3g} {unit}"
    return str(amount)


def duration(seconds: float) -> str:
    """3.2 s, 4 min 10 s, 2 h 5 min."""
    if seconds < 60:
        return f"{number(seconds, 2)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def listing(words: Sequence[str], most: int = 4) -> str:
    """a, b and c; with more than ``most`` words the rest is counted."""
    shown = list(words[:most])
    if len(words) > most:
        shown.append(f"{len(words) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def ranges(indices: Sequence[int]) -> str:
    """Sorted whole numbers with runs folded: 0, 3–5, 9."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)


def places(noun: str, indices: Sequence[int], of: int = 0) -> str:
    """block 3, blocks 0–5, 9; with ``of`` and many gaps only how many: 12 of 30 blocks."""
    told = ranges(indices)
    if of and told.count(",") > 3:
        return f"{len(indices)} of {count(of, noun)}"
    return f"{plural(len(indices), noun)} {told}"


def role(name: str) -> str:
    return ROLE_NAMES.get(name, name)


def title(name: str) -> str:
    """A metric's short name as a heading: zero_fraction becomes Zero fraction."""
    spaced = name.replace("_", " ").replace("n calls", "calls")
    return spaced[:1].upper() + spaced[1:]


def unit(name: str) -> str:
    return "" if name == "1" else name


def quantity(name: str, unit_name: str) -> str:
    """The title of an axis: the name, and the unit where there is one."""
    return f"{name} ({unit(unit_name)})" if unit(unit_name) else name


def law(text: str, noun: str = "block") -> str:
    """What `GrowthLaw` says, with what the depths count in the model at hand."""
    return text.replace("R2", "R²").replace("block", noun)


def literal(name: str) -> str:
    """``name`` as Plotly must be given it so that it is shown and never interpreted.

    Plotly reads pseudo-HTML in every text and ``%{…}`` in some; a zero-width space ends the latter.
    """
    return escape(name, quote=False).replace("%{", "%\u200b{")


def _trim(digits: str) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _minus(text: str) -> str:
    return text.replace("-", "−") if text.startswith("-") else text
