"""Maximum likelihood and ratios of quantiles against scipy and sorting."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dynscope import weibull
from dynscope.weibull import maximum_likelihood, ratios

Floats = NDArray[np.float64]
DRAWS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "Weibull 0.7": lambda g, n: 3e-3 * g.weibull(0.7, n),
    "Weibull 2.5": lambda g, n: 40.0 * g.weibull(2.5, n),
    "normal": lambda g, n: 0.02 * g.standard_normal(n),
    "uniform": lambda g, n: g.uniform(-1, 1, n),
    "Student t3": lambda g, n: g.standard_t(3, n),
    "few levels": lambda g, n: np.round(g.standard_normal(n) * 5),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_maximum_likelihood_is_scipy_s(draw: str) -> None:
    values = DRAWS[draw](np.random.default_rng(0), 20_000)
    fit = maximum_likelihood(values)
    magnitudes = np.abs(values[values != 0])
    k, _, lam = stats.weibull_min.fit(magnitudes, floc=0)
    assert (fit.k, fit.lam) == pytest.approx((k, lam), rel=2e-4)

    def loss(k: float, lam: float) -> float:
        return -float(stats.weibull_min.logpdf(magnitudes, k, scale=lam).sum())

    best = loss(fit.k, fit.lam)
    for k, lam in ((fit.k * 1.001, fit.lam), (fit.k, fit.lam * 1.001), (fit.k / 1.001, fit.lam)):
        assert loss(k, lam) > best
    twin = stats.kstest(magnitudes, stats.weibull_min(fit.k, scale=fit.lam).cdf).statistic
    assert fit.ks == pytest.approx(twin, rel=1e-9)
    assert (fit.method, fit.trim, fit.n) == ("likelihood", "full_range", len(magnitudes))


@pytest.mark.parametrize("draw", ["Weibull 0.7", "normal", "uniform"])
def test_its_standard_error_is_the_spread_of_samples_drawn_again(draw: str) -> None:
    random = np.random.default_rng(1)
    fits = [maximum_likelihood(DRAWS[draw](random, 2000)) for _ in range(300)]
    stated = np.mean([fit.k_stderr for fit in fits])
    assert stated == pytest.approx(np.std([fit.k for fit in fits]), rel=0.12)


def test_gaussian_weights_have_another_k_by_likelihood_than_by_the_plot() -> None:
    values = stats.halfnorm.ppf((np.arange(400_000) + 0.5) / 400_000)
    assert maximum_likelihood(values).k == pytest.approx(1.26276, abs=1e-4)


@pytest.mark.parametrize("values", [np.ones(500), np.zeros(500), np.full(5, 0.1), np.arange(500)])
def test_no_likelihood_without_a_sample(values: Floats) -> None:
    fit = maximum_likelihood(values)
    assert fit.reason in weibull.REASONS[1:] and fit.method == "likelihood" and np.isnan(fit.k)


def gini_twin(values: Floats) -> float:
    return float(np.abs(values[:, None] - values[None, :]).mean() / (2 * values.mean()))


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("n", [101, 1500])
def test_ratios_are_those_of_the_sorted_magnitudes(draw: str, n: int) -> None:
    values = DRAWS[draw](np.random.default_rng(2), n)
    magnitudes = np.abs(values[values != 0])
    if len(magnitudes) < 100:
        assert np.isnan(ratios(values)).all()
        return
    q10, q50, q90, q99, q999 = np.quantile(magnitudes, [0.1, 0.5, 0.9, 0.99, 0.999])
    expected = (q90 / q10, q99 / q50, q999 / q50, gini_twin(magnitudes))
    assert ratios(values) == pytest.approx(expected, rel=1e-12)
    assert ratios(weibull.count(values.astype(np.float64))) == ratios(values)


@pytest.mark.parametrize(
    ("quantile", "expected"),
    [
        (stats.halfnorm.ppf, (13.0896, 3.8189, 4.8785, 2**0.5 - 1)),
        (stats.expon.ppf, (21.8543, 6.6439, 9.9658, 0.5)),
        (stats.uniform.ppf, (9.0, 1.98, 1.998, 1 / 3)),
    ],
)
def test_ratios_of_a_large_even_sample_are_the_population_s(
    quantile: Callable[[Any], Any], expected: tuple[float, ...]
) -> None:
    for n, error in ((900_000, 2e-4), (1_100_000, 3e-3)):  # kept, and rounded to 256 an octave
        values = quantile((np.arange(n) + 0.5) / n)
        assert ratios(values) == pytest.approx(expected, rel=error)
