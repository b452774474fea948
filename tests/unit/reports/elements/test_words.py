"""Numbers, lists and names as a page spells them."""

from math import inf, nan

import pytest

from dynscope.reports.elements import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1.0, "1"), (1234.0, "1,234"), (0.0213, "0.0213"), (3.1e-7, "3.1×10⁻⁷"),
        (2.5e9, "2.5×10⁹"), (-4.2, "−4.2"), (nan, "–"), (inf, "∞"), (-inf, "−∞"), (99.96, "100"),
    ],
)  # fmt: skip
def test_a_number_has_three_significant_digits(value: float, text: str) -> None:
    assert words.number(value) == text


def test_sizes_and_times_are_those_of_a_person() -> None:
    assert words.size(1_800_000) == "1.8 MB"
    assert words.size(12) == "12 bytes"
    assert words.duration(250) == "4 min 10 s"
    assert words.duration(7500) == "2 h 5 min"
    assert words.parameters(24_500_000) == "24.5 M"


def test_long_lists_and_runs_of_numbers_are_folded() -> None:
    assert words.listing(["a"]) == "a"
    assert words.listing(["a", "b", "c"]) == "a, b and c"
    assert words.listing(list("abcdef"), most=3) == "a, b, c and 3 more"
    assert words.places("block", [0, 3, 4, 5]) == "blocks 0, 3–5"
    assert words.places("block", [0, 2, 4, 6, 8], of=9) == "5 of 9 blocks"
    assert words.count(1, "step") == "1 step"
    assert words.count(2, "entry") == "2 entries"


def test_plotly_is_given_nothing_that_it_interprets() -> None:
    assert "%{" not in words.literal("50%{y}")
    assert "<" not in words.literal("<b>q</b>")
