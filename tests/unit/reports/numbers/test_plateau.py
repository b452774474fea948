"""Where a massive activation begins and ends, from the top elements of every block."""

from dataclasses import replace

import numpy as np

from dynscope.reports.numbers.curves import Curve
from dynscope.reports.numbers.plateau import notes, plateau
from dynscope.reports.numbers.summaries import Massive


def massive(top: list[float], channel: list[int], token: list[int]) -> Massive:
    """Of one step: the largest of each block, two ordinary ones beside it, median one half."""
    depths = np.arange(len(top))
    curve = Curve("residual stream", "block", 0, depths, depths, tuple(map(str, depths)))
    three = np.array([[(one, 5.0, 4.0) for one in top]])
    channels, tokens = (
        np.array([[(one, 0, 0) for one in part]], np.float32) for part in (channel, token)
    )
    return Massive(curve, np.array([1]), three, channels, tokens, np.full((1, len(top)), 0.5))


def test_it_reaches_over_the_blocks_with_one_channel() -> None:
    one = plateau(massive([10, 700, 2000, 2100, 2050, 90], [7] * 6, [4, 0, 0, 0, 0, 0]), 0)
    assert one is not None
    assert one.where == "channel 7 of token 0 from block 1 to block 4"
    assert (one.value, one.ratio) == (2100, 4200)


def test_another_channel_ends_it_and_tokens_may_differ() -> None:
    one = plateau(massive([600, 700, 2000, 2100, 800], [3, 7, 7, 7, 9], [0, 0, 5, 0, 0]), 0)
    assert one is not None
    assert one.where == "channel 7 from block 1 to block 3"


def test_one_that_lasts_to_the_end_or_stands_alone_is_told_so() -> None:
    last = plateau(massive([10, 700, 700], [7, 7, 7], [0, 0, 0]), 0)
    alone = plateau(massive([10, 700, 10], [7, 7, 7], [0, 0, 0]), 0)
    assert last is not None and last.where == "channel 7 of token 0 from block 1 on"
    assert alone is not None and alone.where == "channel 7 of token 0 in block 1"


def test_small_ones_and_unknown_medians_are_none() -> None:
    assert plateau(massive([99, 99], [1, 1], [0, 0]), 0) is None
    assert plateau(massive([400, 400], [1, 1], [0, 0]), 0) is None  # 800 times the median
    large = massive([5000.0, np.nan], [1, -1], [0, -1])
    assert plateau(replace(large, median=None), 0) is None
    assert plateau(replace(large, median=np.zeros((1, 2))), 0) is None
    assert plateau(large, 0) is not None


def test_every_step_has_its_sentence() -> None:
    one = massive([10, 700, 10], [7, 7, 7], [0, 0, 0])
    assert one.median is not None
    two = replace(
        one,
        steps=np.array([1, 2]),
        magnitude=np.concatenate([one.magnitude, one.magnitude / 700]),
        channel=np.concatenate([one.channel] * 2),
        token=np.concatenate([one.token] * 2),
        median=np.concatenate([one.median] * 2),
    )
    assert notes(two) == (
        "A massive activation in channel 7 of token 0 in block 1: up to 700, 1,400 times the median.",
        "",
    )
