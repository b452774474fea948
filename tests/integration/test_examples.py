"""The examples are the architectures they say they are, and the demo ends with a page."""

from pathlib import Path

import pytest
import torch

import dynscope
from examples import mix_ln, pre_ln
from examples.compare import record
from examples.demo import claims
from examples.language_model import Attention, Size
from examples.text import Text
from examples.train import Recipe

SIZE = Size(width=32, heads=2, hidden=48, blocks=8, context=16)


def test_both_architectures_start_from_the_same_weights() -> None:
    states = []
    for build in (pre_ln.build, mix_ln.build):
        torch.manual_seed(0)
        states.append(build(SIZE).state_dict())
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name


def test_rotary_attention_sees_relative_positions_and_never_the_future() -> None:
    torch.manual_seed(0)
    attention = Attention(SIZE)
    q = attention.rotate(torch.ones(SIZE.context, SIZE.width // SIZE.heads))
    torch.testing.assert_close(q[3] @ q[1], q[9] @ q[7])
    x = torch.randn(1, SIZE.context, SIZE.width)
    changed = x.clone()
    changed[:, 9:] += 1
    torch.testing.assert_close(attention(x)[:, :9], attention(changed)[:, :9])


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    recipe = Recipe(steps=100)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == 1
    assert rates[-1] == pytest.approx(0.1, abs=0.001)


def test_a_text_too_short_to_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(Exception, match="too short: 9 bytes"):
        Text.read(tmp_path / "short.txt")


def test_the_demo_records_two_runs_and_reads_its_claims_from_them(tmp_path: Path) -> None:
    recipe = Recipe(steps=6, batch=2, every=2, validate_every=3)
    for _ in range(2):  # a folder that was used before is no obstacle
        pre, mix = map(
            dynscope.load, record(["pre_ln", "mix_ln"], tmp_path, Text.read(), recipe, SIZE)
        )
    assert list(pre.steps) == list(mix.steps)
    assert {"loss", "validation_loss"} <= set(pre.scalar_names)
    assert mix.metadata.config["architecture"] == "mix_ln"
    assert ["8" in claim.text for claim in claims(pre, mix)] == [True, False, True]
