"""The words that a k gets, at the figures the paper and its own table publish."""

from math import nan

import pytest

from dynscope.analysis.verdicts import BAND, ENOUGH, Verdict, verdict, weight_class

MANY = 20 * ENOUGH


def word(role: str, k: float, n: int = MANY, error: float = 3e-4, r2: float = 0.99) -> str:
    return verdict(role, k, error, n, r2).word


@pytest.mark.parametrize(
    ("role", "k", "expected"),
    [
        ("gate", 1.1947, "in the band"),  # Mistral
        ("up", 1.1870, "at the band's lower edge"),
        ("down", 1.1840, "at the band's lower edge"),
        ("down", 1.1741, "below the band"),
        ("in", 1.2026, "at the band's upper edge"),  # Pythia-6.9b
        ("in", 1.2150, "above the band"),
        ("gate", 1.2054, "Gaussian"),
        ("gate", 1.3751, "uniform"),
        ("q", 1.2054, "Gaussian"),
        ("q", 0.8123, "below the band: strong selection"),  # OLMo-1
        ("k", 1.1462, "below the band: mild selection"),  # Llama-3-8B
        ("k", 1.1830, "below the band"),
        ("q", 1.1950, "no selection"),
        ("o", 1.0409, "no band"),  # OLMo-1, which contradicts a band for attention's output
        ("v", 1.1930, "no band"),
        ("embed", 1.1930, "no band"),
    ],
)
def test_a_published_value_gets_its_word(role: str, k: float, expected: str) -> None:
    assert word(role, k) == expected


def test_one_small_matrix_is_not_read_against_the_band() -> None:
    assert word("gate", 1.19, n=ENOUGH - 1) == "too few weights"
    assert "pooled" in verdict("gate", 1.19, 2e-3, ENOUGH - 1, 0.99).note
    assert word("gate", 1.19, n=ENOUGH) == "in the band"


def test_an_uncertain_value_is_at_the_edge_rather_than_outside() -> None:
    assert word("gate", 1.180, error=1e-4) == "below the band"
    assert word("gate", 1.180, error=4e-3) == "at the band's lower edge"
    assert word("gate", BAND[1] + 0.05, error=nan) == "above the band"


def test_no_fit_and_a_bad_fit_are_said() -> None:
    assert word("gate", nan) == "no fit"
    assert word("gate", 1.19, r2=0.9) == word("gate", 1.19, r2=nan) == "not Weibull"


def test_quantized_storage_is_said_with_every_word() -> None:
    for role, k, n in (("gate", 1.19, MANY), ("q", 1.1, MANY), ("o", 1.1, MANY), ("up", 1.19, 10)):
        assert "Q4_K" in verdict(role, k, 1e-3, n, 0.99, "Q4_K").note
    assert verdict("gate", 1.19, 1e-3, MANY, 0.99) == Verdict("in the band")


def test_classes_are_those_of_the_paper() -> None:
    assert {r for r in ("q", "k", "v", "o", "up", "experts") if weight_class(r)} == {
        "q", "k", "o", "up", "experts",
    }  # fmt: skip
    assert weight_class("q") == "selection"
    assert weight_class("o") == weight_class("down") == "transmission"


@pytest.mark.parametrize("protocol", ["exact mid_90", "binned full_range"])
def test_another_part_than_the_middle_is_read_against_nothing(protocol: str) -> None:
    for role, k in (("gate", 1.1908), ("q", 1.19), ("up", 1.2054), ("o", 1.1)):
        found = verdict(role, k, 1e-3, MANY, 0.99, protocol=protocol)
        assert found.word == "not read" and protocol in found.note
    for good in ("", "exact mid_80", "binned mid_80"):
        assert verdict("gate", 1.1908, 1e-3, MANY, 0.99, protocol=good).word == "in the band"


def test_storage_that_rounds_to_zero_is_read_against_nothing() -> None:
    for kind in ("Q8_0", "Q4_0, F16"):
        assert verdict("gate", 1.2292, 1e-3, MANY, 0.99, kind).word == "not read"
    assert verdict("gate", 1.19, 1e-3, MANY, 0.99, "Q4_1, Q8_0").word == "in the band"
