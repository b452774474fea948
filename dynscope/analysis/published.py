"""The Weibull shape of published models, kind by kind, and which of them a model is nearest to.

Figures: the database of the Weibull paper, arXiv 2605.18898, CC-BY-4.0. Each is the median k over a
model's matrices of that kind, middle 80 % by the paper's binned protocol, at the end of training.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot, isfinite, sqrt

SOURCE = "Weibull weight magnitudes, arXiv 2605.18898, table of 12 models (CC-BY-4.0)"

PROTOCOL_ERROR = 0.003
"""How far the paper's binned protocol moves a k with the mere scale of the weights."""

FEWEST_ROLES = 3
"""Kinds of matrices that two models must share before they are compared."""


@dataclass(frozen=True)
class Published:
    """A published model: its k by role; ``saturation`` is T / tau where the paper tells it.

    Models whose query, key and value are stored as one matrix have the role ``qkv`` only.
    """

    name: str
    k: Mapping[str, float]
    saturation: float | None = None


_MERGED = ("qkv", "o", "in", "out")
_GATED = ("q", "k", "v", "o", "gate", "up", "down")


def _published(name: str, *k: float, saturation: float | None = None) -> Published:
    roles = _MERGED if len(k) == len(_MERGED) else _GATED
    return Published(name, dict(zip(roles, k, strict=True)), saturation)


PUBLISHED: tuple[Published, ...] = (
    _published("Pythia 70M", 1.0488, 1.1838, 1.1903, 1.1898, saturation=1.43),
    _published("Pythia 160M", 1.0982, 1.1917, 1.1927, 1.1953, saturation=0.86),
    _published("Pythia 410M", 1.1466, 1.1988, 1.1991, 1.2011, saturation=0.43),
    _published("Pythia 1B", 1.1758, 1.1990, 1.1997, 1.1993, saturation=0.43),
    _published("Pythia 6.9B", 1.1726, 1.1986, 1.2026, 1.2010, saturation=0.17),
    _published("OLMo 1", 0.8123, 0.7601, 1.0601, 1.0409, 1.2010, 1.2039, 1.2041),
    _published("OLMo 2", 0.9895, 0.9716, 1.1930, 1.1958, 1.1976, 1.2032, 1.2031),
    _published("Llama 3 8B", 1.1352, 1.1462, 1.1710, 1.1841, 1.1890, 1.1971, 1.1931),
    _published("Mistral", 1.1485, 1.1291, 1.1702, 1.1902, 1.1947, 1.1964, 1.1926),
    _published("Qwen2.5 7B", 1.1328, 1.1033, 1.1430, 1.1665, 1.1904, 1.1888, 1.1830),
    _published("Qwen2.5 14B", 1.1638, 1.1413, 1.1628, 1.1903, 1.1929, 1.1926, 1.1897),
    _published("Qwen3 8B", 1.1623, 1.1539, 1.1581, 1.1802, 1.1872, 1.1886, 1.1846),
)


@dataclass(frozen=True)
class Neighbour:
    """A published model beside one's own.

    ``distance`` is the root mean square difference of k over ``roles``, those both have;
    ``uncertainty`` is its standard error, of both sides' k.
    """

    model: Published
    distance: float
    uncertainty: float
    roles: tuple[str, ...]


def nearest(k: Mapping[str, float], error: Mapping[str, float]) -> tuple[Neighbour, ...]:
    """Published models by their distance from a model whose k, by role, has standard ``error``.

    Models that share fewer than `FEWEST_ROLES` roles are left out. Roles whose k is NaN do not
    count; a missing error counts as none.
    """
    found = []
    for model in PUBLISHED:
        shared = tuple(role for role in model.k if isfinite(k.get(role, float("nan"))))
        if len(shared) >= FEWEST_ROLES:
            found.append(_neighbour(model, shared, k, error))
    return tuple(sorted(found, key=lambda one: one.distance))


def _neighbour(
    model: Published, roles: tuple[str, ...], k: Mapping[str, float], error: Mapping[str, float]
) -> Neighbour:
    apart = [k[role] - model.k[role] for role in roles]
    distance = sqrt(sum(one**2 for one in apart) / len(roles))
    errors = [hypot(_known(error.get(role, 0.0)), _PUBLISHED_ERROR) for role in roles]
    moved = sqrt(sum((one * e) ** 2 for one, e in zip(apart, errors, strict=True)))
    uncertainty = moved / (len(roles) * distance) if distance > 0 else max(errors)
    return Neighbour(model, distance, uncertainty, roles)


_PUBLISHED_ERROR = PROTOCOL_ERROR / sqrt(3)  # of a value that is evenly spread within the error


def _known(error: float) -> float:
    return error if isfinite(error) else 0.0
