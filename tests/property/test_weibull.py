"""What must hold of a Weibull fit whatever the weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynscope import weibull
from dynscope.hooks.training import weights

Floats = NDArray[np.float64]


@st.composite
def samples(draw: st.DrawFn, fewest: int = 100, most: int = 3000) -> Floats:
    """Weights of a drawn shape, heavy or light tailed, with and without ties."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(fewest, most))
    values = generator.weibull(draw(st.floats(0.3, 6)), size)
    values *= generator.choice([-1.0, 1.0], size)
    return values if draw(st.booleans()) else np.round(values, 2)


@given(samples(), st.floats(1e-6, 1e6))
def test_scaling_leaves_k_alone_and_scales_lambda(values: Floats, scale: float) -> None:
    plain, scaled = weibull.fit(values), weibull.fit(values * scale)
    assert scaled.reason == plain.reason
    if not plain.reason:
        assert scaled.k == pytest.approx(plain.k, rel=1e-9)
        assert scaled.lam == pytest.approx(plain.lam * scale, rel=1e-9)
        assert scaled.r2 == pytest.approx(plain.r2, abs=1e-9)
        assert scaled.k_stderr == pytest.approx(plain.k_stderr, rel=1e-6)


@given(samples(), st.sampled_from(["exact", "binned"]))
def test_order_and_sign_do_not_matter(values: Floats, method: str) -> None:
    generator = np.random.default_rng(0)
    other = generator.permutation(values) * generator.choice([-1, 1], values.size)
    assert str(weibull.fit(other, method)) == str(weibull.fit(values, method))


@given(samples(), st.floats(0.2, 5))
def test_raising_magnitudes_to_a_power_divides_k(values: Floats, power: float) -> None:
    plain, raised = weibull.fit(values), weibull.fit(np.abs(values) ** power)
    if not plain.reason and not raised.reason:
        assert raised.k == pytest.approx(plain.k / power, rel=1e-6)


@given(samples(), st.integers(0, 500), st.integers(0, 500))
def test_zeros_and_non_finite_values_change_only_their_counts(
    values: Floats, zeros: int, broken: int
) -> None:
    values = values[values != 0]
    bad = np.resize([np.nan, np.inf, -np.inf], broken)
    plain = weibull.fit(values)
    mixed = weibull.fit(np.concatenate([np.zeros(zeros), values, bad]))
    assert mixed.nonfinite_count == broken and mixed.n == plain.n
    assert mixed.zero_fraction == zeros / (values.size + zeros + broken)
    if not mixed.reason:
        assert (mixed.k, mixed.lam, mixed.ks) == (plain.k, plain.lam, plain.ks)


@given(samples(fewest=2**14 + 1, most=2**15), st.floats(1e-5, 1e5))
@settings(max_examples=25, deadline=None)
def test_counting_by_bits_agrees_with_sorting_far_inside_the_standard_error(
    values: Floats, scale: float
) -> None:
    tensor = torch.from_numpy(values * scale).float().reshape(1, -1)
    counted = weibull.derive(weights.collect([("w", tensor)]))
    fit = weibull.fit(tensor.numpy())
    if fit.reason:
        assert weibull.REASONS[int(counted["weight/weibull_reason"][0])] == fit.reason
    else:
        off = abs(counted["weight/weibull_k"][0] / fit.k - 1)
        rounding = 1e-3 if fit.flags else 1e-4  # few levels round all to one side by chance
        assert off < 0.02 * fit.k_stderr / fit.k + rounding


@given(st.lists(st.floats(width=32), max_size=300))
def test_any_floats_at_all_give_a_fit_or_a_reason(values: list[float]) -> None:
    fit = weibull.fit(np.array(values, np.float32))
    assert (fit.reason == "") == np.isfinite(fit.k)
    tensor = torch.tensor(values, dtype=torch.float32).reshape(1, -1)
    row = weibull.derive(weights.collect([("w", tensor)]))
    assert row["weight/nonfinite_count"][0] == fit.nonfinite_count
    assert row["weight/weibull_n"][0] == fit.n
