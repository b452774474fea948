"""Weibull fits at the sizes of real matrices: against sorting, populations, npm-weibull-py, models."""

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from npm_weibull import extract_to_histogram, weibull_fit
from numpy.typing import NDArray
from scipy import stats

from dynscope import weibull
from dynscope.weibull import fit
from dynscope.weibull.histogram import Histogram
from examples import packaged
from tests.unit.weibull.test_fits import population

Array = NDArray[Any]
N = 1 << 20

DRAWS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "half-normal": lambda g, n: g.standard_normal(n),
    "Laplace": lambda g, n: g.laplace(size=n),
    "uniform": lambda g, n: g.uniform(-1, 1, n),
    "Student t3": lambda g, n: g.standard_t(3, n),
    "Weibull 1.5": lambda g, n: g.weibull(1.5, n),
    "truncated normal": lambda g, n: stats.truncnorm.rvs(-2, 2, size=n, random_state=g),
}
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)


def by_sorting(values: Array) -> weibull.WeibullFit:
    """The fit of every magnitude as it is, whatever their number."""
    levels, counts = np.unique(np.abs(values.astype(np.float64)), return_counts=True)
    return fit(Histogram.of_counts(levels, counts))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_million_weights_are_fitted_as_sorting_fits_them(draw: str, dtype: Any) -> None:
    values = 0.02 * DRAWS[draw](np.random.default_rng(0), N)
    for scale in (1.0, 50.0, 1 / 3):
        array = (values * scale).astype(dtype)
        found, exact = fit(array), by_sorting(array)
        assert abs(found.k - exact.k) < 2e-7  # asked for: 2e-4
        assert found.lam == pytest.approx(exact.lam, rel=1e-7)  # asked for: 1e-4
        assert found.n == exact.n and abs(found.ks - exact.ks) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWS)
def test_scaling_with_50_moves_nothing(draw: str) -> None:
    values = (0.02 * DRAWS[draw](np.random.default_rng(1), N)).astype(np.float32)
    plain, scaled = fit(values), fit(values * np.float32(50))
    assert abs(plain.k - scaled.k) < 3e-7  # asked for: 1e-4, and 2e-4 where weights are uniform
    assert scaled.lam == pytest.approx(50 * plain.lam, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_below_a_million_it_is_sorting(dtype: Any) -> None:
    values = (0.02 * np.random.default_rng(2).standard_normal(200_000)).astype(dtype)
    found, exact = fit(values), by_sorting(values)
    assert found.k == pytest.approx(exact.k, rel=1e-8)
    assert found.lam == pytest.approx(exact.lam, rel=1e-8)


POPULATIONS = {
    "half-normal": stats.halfnorm.ppf,
    "Laplace": stats.expon.ppf,
    "uniform": stats.uniform.ppf,
    "Weibull 1.5": stats.weibull_min(1.5).ppf,
    "Student t3": lambda p: stats.t(3).ppf((1 + p) / 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("draw", POPULATIONS)
def test_ten_million_weights_reach_the_population_s_k(draw: str) -> None:
    k, lam, _ = population(POPULATIONS[draw], 0.1, 0.9)
    found = fit(DRAWS[draw](np.random.default_rng(3), 10**7).astype(np.float32))
    assert abs(found.k - k) < 3 * found.k_stderr < 3e-3
    assert found.lam == pytest.approx(lam, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("draw", POPULATIONS)
def test_the_interval_covers_the_population_s_k_as_often_as_it_should(draw: str) -> None:
    k, _, _ = population(POPULATIONS[draw], 0.1, 0.9)
    random = np.random.default_rng(4)
    fits = [fit(DRAWS[draw](random, 20_000)) for _ in range(200)]
    covered = np.mean([abs(one.k - k) < 1.96 * one.k_stderr for one in fits])
    assert 0.91 <= covered <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("n", [4096, 100_000, N])
def test_the_binned_protocol_is_npm_weibull_s(draw: str, n: int) -> None:
    values = (0.02 * DRAWS[draw](np.random.default_rng(5), n)).astype(np.float32)
    for trim in weibull.TRIMS:
        theirs = weibull_fit(extract_to_histogram(torch.from_numpy(values)), trim=trim)
        found = fit(values, method="binned", trim=trim)
        own = [found.k, found.lam, found.r2, found.ks]
        assert own == pytest.approx(
            [theirs[name] for name in ("k", "lambda", "R2", "KS")], rel=1e-6
        )


def matrices(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((n, p.detach()) for n, p in model.named_parameters() if p.ndim == 2)


@pytest.mark.slow
@pytest.mark.parametrize("package", [packaged.MINILM, packaged.SMOLLM2])
def test_every_matrix_of_a_trained_model_agrees_with_npm_weibull(package: str) -> None:
    if package == packaged.MINILM:
        from examples.finetune_minilm import load as load_minilm

        model: Any = load_minilm()[0]
    else:
        from examples.inspect_smollm2 import load

        model = load()[0]
    seen = 0
    for name, weight in matrices(model):
        theirs = weibull_fit(extract_to_histogram(weight))["k"]
        assert abs(fit(weight.numpy()).k - theirs) < 0.01, name
        seen += 1
    assert seen >= {packaged.MINILM: 36, packaged.SMOLLM2: 210}[package]
