"""The overhead benchmark runs; what it measures is measured by hand, not in tests."""

import pytest

from benchmarks.overhead import BLOCKS, GPT, ROWS, TOY, Shape, table

pytestmark = pytest.mark.slow


def test_the_model_is_the_one_that_is_described() -> None:
    model = GPT(Shape())
    assert sum(parameter.numel() for parameter in model.parameters()) == 24_538_368
    assert sum(not list(module.children()) for module in model.modules()) == 88


def test_a_row_is_printed_for_every_configuration_and_for_sleeping_hooks() -> None:
    rows = {name: ROWS[name] for name in (BLOCKS, "weights alone, every step")}
    text = table(TOY, rows, rounds=3)
    assert all(f"| {name} |" in text for name in rows)
    assert "hooks that do not record" in text and "every 10th step" in text
