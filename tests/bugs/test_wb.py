"""Weibull fits and weights as real models bring them; one test per reported case."""

import time

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dynscope import weibull
from dynscope.hooks.training import weights

Floats = NDArray[np.float64]


def derived(*tensors: torch.Tensor) -> dict[str, NDArray[np.float64]]:
    return weibull.derive(weights.collect([("w", tensor) for tensor in tensors]))


def signed_weibull(k: float, scale: float, n: int = 20_000) -> Floats:
    generator = np.random.default_rng(0)
    return np.asarray(scale * generator.weibull(k, n) * generator.choice([-1.0, 1.0], n))


@pytest.mark.parametrize(("k", "scale"), [(0.8, 0.01), (1.2, 0.02), (2.0, 0.05)])
def test_wb_01_a_fit_recovers_planted_parameters(k: float, scale: float) -> None:
    fit = weibull.fit(signed_weibull(k, scale))
    assert fit.k == pytest.approx(k, rel=0.03)
    assert fit.lam == pytest.approx(scale, rel=0.03)
    assert abs(fit.k - k) < 4 * fit.k_stderr


def test_wb_03_constant_weights_are_named_not_fitted() -> None:
    fit = weibull.fit(np.ones(1000))
    assert np.isnan(fit.k) and fit.reason == weibull.CONSTANT
    assert np.isnan(derived(torch.ones(40, 40))["weight/weibull_k"][0])


def test_wb_04_zeros_are_left_out_and_their_share_is_kept() -> None:
    weights_left = np.random.default_rng(0).standard_normal(500)
    fit = weibull.fit(np.append(np.zeros(500), weights_left))
    assert fit.k == weibull.fit(weights_left).k
    assert fit.zero_fraction == 0.5 and fit.n == 500


def test_wb_05_tiny_layers_have_no_fit_but_a_count() -> None:
    row = derived(torch.ones(1, 1), torch.ones(2, 1), torch.randn(2, 4), torch.empty(0, 8))
    assert np.isnan(row["weight/weibull_k"]).all()
    assert row["weight/weibull_n"].tolist() == [1, 2, 8, 0]
    assert np.isnan(row["weight/norm"]).tolist() == [False, False, False, True]


def test_wb_06_one_nan_leaves_the_fit_of_the_finite_part_with_the_count() -> None:
    values = np.random.default_rng(0).standard_normal(1000)
    fit = weibull.fit(np.append(values, np.nan))
    assert fit.k == weibull.fit(values).k and fit.nonfinite_count == 1


def test_wb_08_location_is_fixed_at_zero() -> None:
    away_from_zero = 5 + np.random.default_rng(0).random(1000)
    fit = weibull.fit(away_from_zero)  # a free location would put its origin near 5
    assert fit.lam == pytest.approx(np.median(away_from_zero), rel=0.05)
    assert 10 < fit.k < 40


def test_wb_16_parameters_without_values_are_missing_until_they_have_some() -> None:
    layer = torch.nn.Linear(20, 20, device="meta")
    lazy = torch.nn.LazyLinear(20)
    row = derived(layer.weight, layer.bias, lazy.weight)
    assert np.isnan(row["weight/norm"]).all() and np.isnan(row["weight/weibull_k"]).all()
    layer.to_empty(device="cpu").reset_parameters()
    assert np.isfinite(derived(layer.weight)["weight/weibull_k"][0])


def test_wb_18_every_weight_counts_and_two_million_take_a_fraction_of_a_second() -> None:
    tensor = torch.randn(2000, 1000, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    row = derived(tensor)
    assert time.perf_counter() - start < 0.8  # 0.02 s here; 1.6 s by maximum likelihood
    assert row["weight/weibull_n"][0] == tensor.numel()


def test_wb_19_the_distance_betrays_two_populations() -> None:
    generator = np.random.default_rng(0)
    two = np.append(generator.standard_normal(5000), 100 * generator.standard_normal(5000))
    one = weibull.fit(generator.standard_normal(10_000))
    assert weibull.fit(two).ks > 3 * one.ks


def test_nu_06_bfloat16_weights_are_fitted() -> None:
    tensor = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    plain, half = derived(tensor, tensor.bfloat16())["weight/weibull_k"]
    assert half == pytest.approx(plain, abs=3e-4)


def test_nu_08_packed_storage_is_never_fitted_as_numbers() -> None:
    packed = torch.randint(0, 255, (100, 100), dtype=torch.uint8)
    row = derived(packed, packed.view(torch.int8))
    assert np.isnan(row["weight/weibull_k"]).all() and np.isnan(row["weight/norm"]).all()


@pytest.mark.slow
def test_nu_09_more_elements_than_torch_quantile_takes() -> None:
    tensor = torch.randn(20_000, 1000, generator=torch.Generator().manual_seed(0))
    row = derived(tensor)
    assert row["weight/weibull_n"][0] == 20_000_000
    assert row["weight/weibull_k"][0] == pytest.approx(weibull.HALF_NORMAL_K, abs=1.5e-3)


def test_nu_13_the_users_default_dtype_does_not_reach_the_sums() -> None:
    tensor = torch.randn(50, 50)
    plain = derived(tensor)["weight/norm"]
    torch.set_default_dtype(torch.float16)
    try:
        assert derived(tensor)["weight/norm"] == plain
    finally:
        torch.set_default_dtype(torch.float32)
