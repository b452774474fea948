"""Which rows of a long run are drawn."""

import numpy as np

from dynscope.reports.numbers.thinning import affordable_rows, thin, thin_line


def test_a_short_run_is_drawn_whole() -> None:
    drawn = thin(np.arange(1, 21), most=5)
    assert not drawn.thinned
    assert drawn.drawn.tolist() == list(range(1, 21))


def test_a_thinned_run_keeps_its_ends_and_its_extremes_and_says_so() -> None:
    drawn = thin(np.arange(1, 2001), most=100, always=[777, 5000])
    assert {0, 777, 1999} <= set(drawn.rows.tolist())
    assert 5000 not in drawn.rows
    assert 100 <= len(drawn.rows) <= 101
    assert "101 of 2,000 recorded steps" in drawn.text or "100 of" in drawn.text
    assert "the first, the last and those of the largest loss" in drawn.text
    plain = thin(np.arange(1, 2001), most=100)
    assert "always with the first and the last. The words" in plain.text


def test_more_columns_leave_fewer_rows() -> None:
    assert affordable_rows(100) > affordable_rows(20_000) > affordable_rows(20_000, share=0.25)


def test_a_thinned_line_keeps_every_spike() -> None:
    values = np.zeros(100_000)
    values[[12_345, 54_321]] = 9, -9
    rows = thin_line(values)
    assert len(rows) <= 1700
    assert {0, 12_345, 54_321, 99_999} <= set(rows.tolist())


def test_a_line_of_missing_values_can_be_thinned() -> None:
    assert len(thin_line(np.full(10_000, np.nan))) < 10_000
