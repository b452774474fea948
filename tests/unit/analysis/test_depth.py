"""Depth summaries against planted laws and slow twins."""

from math import isnan, nan

import numpy as np
import pytest
from numpy.typing import NDArray

from dynscope.analysis import depth

DEPTHS = np.arange(24)
PLACE = DEPTHS + 1.0


@pytest.mark.parametrize(
    ("values", "kind", "slope"),
    [
        (7 + 3 * PLACE, "linear", 3.0),
        (PLACE, "linear", 1.0),
        (100 - 2 * PLACE, "linear", -2.0),
        (0.1 * PLACE**1.7, "power", 1.7),
        (4 * PLACE**-0.5, "power", -0.5),
        (5 * np.exp(0.2 * PLACE), "exponential", 0.2),
        (np.full(24, 2.5), "flat", 0.0),
    ],
)
def test_a_planted_law_is_found_with_its_slope(
    values: NDArray[np.float64], kind: str, slope: float
) -> None:
    law = depth.growth_law(DEPTHS, values)
    assert law.kind == kind
    assert law.slope == pytest.approx(slope, rel=1e-9)
    assert law.at(DEPTHS) == pytest.approx(values, rel=1e-9)


def test_the_law_survives_noise_missing_values_and_any_order() -> None:
    generator = np.random.default_rng(0)
    values = 3 * PLACE**1.5 * np.exp(0.1 * generator.standard_normal(24))
    values[[3, 10]] = nan, np.inf
    shuffled = generator.permutation(24)
    law = depth.growth_law(DEPTHS[shuffled], values[shuffled])
    assert law.kind == "power" and law.slope == pytest.approx(1.5, abs=0.1)
    assert law.text.startswith("grows like depth^1.") and "R2 0.9" in law.text


def test_no_law_is_named_where_there_is_none() -> None:
    noise = np.exp(np.random.default_rng(1).standard_normal(24))
    assert depth.growth_law(DEPTHS, noise).kind == "none"
    assert isnan(depth.growth_law(DEPTHS[:3], PLACE[:3]).slope)
    assert depth.growth_law([], []).text == "too few blocks for a law"
    assert depth.growth_law(DEPTHS, -PLACE).kind == "none"
    assert depth.growth_law(np.zeros(24), PLACE).kind == "none"
    assert np.isnan(depth.growth_law(DEPTHS, noise).at(DEPTHS)).all()


@pytest.mark.parametrize("blocks", [4, 6, 30])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_step_between_two_levels_is_a_jump_and_no_law(blocks: int, at: int) -> None:
    values = np.where(np.arange(blocks) < at, 30.0, 9000.0)
    up, down = (depth.growth_law(range(blocks), one) for one in (values, 1 / values))
    assert (up.kind, up.jump) == ("none", (at, 300))
    assert up.text == f"jumps 300-fold at block {at} (no law fits)"
    assert down.text == f"drops 300-fold at block {at} (no law fits)"


def test_small_steps_without_a_law_are_no_jump() -> None:
    law = depth.growth_law(range(6), [1.0, 1.2, 0.9, 1.3, 1.0, 1.1])
    assert law.jump is not None and not law.jump.steep
    assert law.text == "no clear trend with depth (largest step 1.4-fold, at block 3)"


def test_a_block_left_out_is_named() -> None:
    values = PLACE.copy()
    values[0] = 1e6
    law = depth.growth_law(DEPTHS, values, leave_out=[0, 99])
    assert law.kind == "linear" and law.left_out == (0,)
    assert law.text.endswith("without block 0")


def test_slopes_are_those_of_polyfit_on_the_logarithm() -> None:
    values = np.random.default_rng(2).uniform(1, 9, 24) * PLACE
    slope = depth.depth_slope(DEPTHS, values)
    for x, found, r2 in (
        (PLACE, slope.per_block, slope.per_block_r2),
        (np.log(PLACE), slope.exponent, slope.exponent_r2),
    ):
        assert found == pytest.approx(np.polyfit(x, np.log(values), 1)[0])
        assert r2 == pytest.approx(np.corrcoef(x, np.log(values))[0, 1] ** 2)
    assert isnan(depth.depth_slope([0, 1], [1, 2]).exponent)


def test_growth_ratio_is_last_over_first() -> None:
    assert depth.growth_ratio([2, 0, 1], [8.0, 2.0, nan]) == 4
    assert isnan(depth.growth_ratio([0, 1], [nan, 1.0]))
    assert isnan(depth.growth_ratio([0, 1], [0.0, 1.0]))


def test_uniformity_is_cv_and_largest_over_smallest() -> None:
    assert depth.uniformity([1.0, 3.0, nan]) == (0.5, 3.0)
    assert isnan(depth.uniformity([-1.0, 3.0]).max_over_min)
    assert isnan(depth.uniformity([]).cv)


def test_the_first_bad_layer_is_the_producer_in_the_direction_of_flow() -> None:
    bad = np.zeros((4, 5))
    bad[0, 3] = nan  # not recorded
    bad[2, 2:], bad[3] = 7, 7
    steps, depths = [10, 20, 30, 40], range(5)
    assert depth.first_bad_layer(steps, depths, bad) == (30, 2)
    assert depth.first_bad_layer(steps, depths, bad, backward=True) == (30, 4)
    assert depth.first_bad_layer(steps, depths, bad[:2]) is None


def runs(seeds: int, noise: float, generator: np.random.Generator) -> NDArray[np.float64]:
    return 1 + noise * generator.standard_normal((seeds, 12, 6))


def test_divergence_is_where_the_gap_exceeds_what_seeds_do() -> None:
    generator = np.random.default_rng(3)
    first, second = runs(3, 0.05, generator), runs(3, 0.05, generator)
    steps = np.arange(12) * 5
    assert depth.first_divergence(steps, range(6), first, second) is None
    second[:, 7:, 2:4] += 2
    assert depth.first_divergence(steps, range(6), first, second) == (35, 2)
    assert depth.first_divergence(steps, range(6), second, first) == (35, 2)


def test_a_single_odd_step_is_no_divergence_and_one_seed_falls_back_on_the_tolerance() -> None:
    first = np.ones((12, 6))
    second = first.copy()
    second[4, 1] = 9
    second[8:, 5] = 1.05
    assert depth.first_divergence(range(12), range(6), first, second) is None
    assert depth.first_divergence(range(12), range(6), first, second, tolerance=0.01) == (8, 5)
    second[:3] = nan
    assert depth.first_divergence(range(12), range(6), first, second, patience=1) == (4, 1)
