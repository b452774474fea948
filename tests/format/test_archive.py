"""Files of every released version stay readable: these were written once and never again."""

from pathlib import Path

import pytest

from dynscope.reading.run import load

ARCHIVE = Path(__file__).parent / "archive"


def test_format_1_of_version_0_1_reads_as_it_was_written() -> None:
    run = load(ARCHIVE / "format_1.h5")
    assert run.metadata.format_version == 1
    assert run.metadata.closed
    assert run.metadata.config == {"blocks": 3, "width": 64, "norm": "pre"}
    assert run.steps.tolist() == [1, 11, 21, 31, 41, 51]
    assert [s.path for s in run.sites[:4]] == [
        "embed", "blocks.0.attention", "blocks.0.ffn", "blocks.0",
    ]  # fmt: skip
    assert run.parameters[1].shape == (64, 64)
    assert [m.name for m in run.metrics] == [
        "activation/count", "activation/variance", "massive/value", "massive/channel",
        "gradient/norm", "optimizer/lr", "weight/weibull_k",
    ]  # fmt: skip
    assert run["activation/variance"].values[0, 0] == pytest.approx(1.0049413442611694, rel=1e-6)
    assert run["massive/channel"].values[-1, 4].tolist() == [17, 17, 3]
    assert run.scalars("loss").values[-1] == pytest.approx(2.041006997556173)
    assert run.weight_steps.tolist() == [1, 11, 21, 41, 51]
    assert run["weight/weibull_k"].values[-1, 2] == pytest.approx(1.0051701068878174, rel=1e-6)
    assert run.events[0].message == "recording began"
    assert run.coverage[0].path == "head"
