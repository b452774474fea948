"""The examples are the architectures they say they are, and the demo ends with a page."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dynscope
from examples import mix_ln, pre_ln
from examples.demo import claims, record
from examples.language_model import Attention, Size
from examples.text import Text
from examples.train import ARCHITECTURES, Recipe

SIZE = Size(width=32, heads=2, hidden=48, blocks=8, context=16)
PLACES = {
    "PreLNBlock": ["attention_norm", "attention", "ffn_norm", "ffn"],
    "PostLNBlock": ["attention", "attention_norm", "ffn", "ffn_norm"],
}


@torch.no_grad()
def stream(model: nn.Module) -> list[Tensor]:
    """What every block puts out on random tokens, the embedding first."""
    x: Tensor = model.get_submodule("embed")(torch.randint(SIZE.vocabulary, (4, SIZE.context)))
    states = [x]
    for block in model.get_submodule("blocks").children():
        states.append(block(states[-1]))
    return states


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_children_are_named_and_ordered_as_they_are_used(architecture: str) -> None:
    model = ARCHITECTURES[architecture](SIZE)
    assert [name for name, _ in model.named_children()] == ["embed", "blocks", "norm", "head"]
    for block in model.blocks:
        places = [name for name, _ in block.named_children()]
        assert places == PLACES[type(block).__name__]


def test_a_pre_ln_block_adds_what_its_sublayers_make_of_the_normalized_stream() -> None:
    torch.manual_seed(0)
    block = pre_ln.build(SIZE).blocks[0]
    assert isinstance(block, pre_ln.PreLNBlock)
    x = torch.randn(2, SIZE.context, SIZE.width)
    between = x + block.attention(block.attention_norm(x))
    torch.testing.assert_close(block(x), between + block.ffn(block.ffn_norm(between)))


def test_mix_ln_holds_the_first_quarter_of_its_blocks_at_mean_square_one() -> None:
    torch.manual_seed(0)
    model = mix_ln.build(SIZE)
    kinds = [type(block).__name__ for block in model.blocks]
    assert kinds == ["PostLNBlock"] * 2 + ["PreLNBlock"] * 6
    squares = [float(state.square().mean()) for state in stream(model)[1:]]
    assert squares[:2] == pytest.approx([1, 1], abs=1e-4)
    assert squares[2:] == sorted(squares[2:]) and squares[-1] > 1.2


def test_both_architectures_start_from_the_same_weights() -> None:
    states = []
    for build in ARCHITECTURES.values():
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
        pre, mix = map(dynscope.load, record(tmp_path, Text.read(), recipe, SIZE))
    assert list(pre.steps) == list(mix.steps)
    assert {"loss", "validation_loss"} <= set(pre.scalar_names)
    assert mix.metadata.config["architecture"] == "mix_ln"
    assert ["8" in claim.text for claim in claims(pre, mix)] == [True, False, True]
