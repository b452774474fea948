"""Weibull fits against slow twins, population values and the binned protocol."""

from collections.abc import Callable
from math import nan
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import integrate, stats

from dynscope import weibull
from dynscope.errors import InputError

Floats = NDArray[np.float64]


def grid(n: int) -> Floats:
    return (np.arange(n) + 0.5) / n


def half_normal(n: int, scale: float = 1.0) -> Floats:
    return np.asarray(stats.halfnorm.ppf(grid(n)) * scale)


def sorted_twin(values: Floats, low: float = 0.1, high: float = 0.9) -> tuple[float, ...]:
    """k, lambda and R2 by the book: sort, plot ln(-ln(1 - p)) on ln|w|, fit the middle."""
    magnitudes = np.sort(np.abs(values))
    p = grid(len(magnitudes))
    middle = (p >= low) & (p <= high)
    x, y = np.log(magnitudes[middle]), np.log(-np.log(1 - p[middle]))
    k, intercept = np.polyfit(x, y, 1)
    r2 = np.corrcoef(x, y)[0, 1] ** 2
    return float(k), float(np.exp(-intercept / k)), float(r2)


def population(quantile: Callable[..., Any], low: float, high: float) -> tuple[float, ...]:
    """k, lambda and R2 of the fit to a whole distribution, by quadrature over p."""

    def over(integrand: Callable[[float, float], float]) -> float:
        def at(p: float) -> float:
            return integrand(float(np.log(quantile(p))), float(np.log(-np.log1p(-p))))

        return float(integrate.quad(at, low, high, epsabs=1e-12)[0]) / (high - low)

    x, y = over(lambda x, _: x), over(lambda _, y: y)
    xx, yy = over(lambda a, _: (a - x) ** 2), over(lambda _, b: (b - y) ** 2)
    xy = over(lambda a, b: (a - x) * (b - y))
    return xy / xx, float(np.exp(x - y * xx / xy)), xy * xy / (xx * yy)


@pytest.mark.parametrize(
    ("quantile", "trim", "expected"),
    [
        (stats.halfnorm.ppf, "mid_80", (1.205434, 0.887487, 0.997740)),
        (stats.halfnorm.ppf, "mid_90", (1.190923, 0.880888, nan)),
        (stats.expon.ppf, "mid_80", (1.0, 1.0, 1.0)),
        (stats.uniform.ppf, "mid_80", (1.375119, nan, nan)),
    ],
)
def test_a_large_even_sample_has_the_population_values(
    quantile: Callable[..., Any], trim: str, expected: tuple[float, float, float]
) -> None:
    exact = population(quantile, *weibull.TRIMS[trim])
    fit = weibull.fit(quantile(grid(200_000)), trim=trim)
    assert (fit.k, fit.lam, fit.r2) == pytest.approx(exact, rel=2e-6)
    known = ~np.isnan(expected)
    assert np.array(exact)[known] == pytest.approx(np.array(expected)[known], abs=1.5e-6)


def test_the_gaussian_constants_are_the_population_values() -> None:
    constants = weibull.HALF_NORMAL_K, weibull.HALF_NORMAL_LAMBDA, weibull.HALF_NORMAL_R2
    assert constants == pytest.approx(population(stats.halfnorm.ppf, 0.1, 0.9), abs=6e-7)


@pytest.mark.parametrize("trim", weibull.TRIMS)
@pytest.mark.parametrize("seed", range(3))
def test_the_fit_is_the_line_on_the_sorted_probability_plot(seed: int, trim: str) -> None:
    values = np.random.default_rng(seed).standard_t(4, 5000)
    fit = weibull.fit(values, trim=trim)
    twin = sorted_twin(values, *weibull.TRIMS[trim])
    assert (fit.k, fit.lam, fit.r2) == pytest.approx(twin, rel=1e-9)


def test_ks_is_the_kolmogorov_smirnov_distance() -> None:
    values = np.random.default_rng(0).standard_normal(20_000)
    fit = weibull.fit(values)
    twin = stats.kstest(np.abs(values), stats.weibull_min(fit.k, scale=fit.lam).cdf)
    assert fit.ks == pytest.approx(twin.statistic, abs=1 / 20_000)


def test_counts_of_distinct_values_give_the_fit_of_the_repeated_values() -> None:
    generator = np.random.default_rng(1)
    levels = np.round(half_normal(3000), 2)
    counts = generator.integers(0, 9, levels.size)
    together = weibull.fit(weibull.Histogram.of_counts(levels, counts))
    assert together == weibull.fit(np.repeat(levels, counts))
    shuffled = generator.permutation(levels.size)
    assert weibull.fit(weibull.Histogram.of_counts(levels[shuffled], counts[shuffled])) == together


def test_ties_take_their_mid_rank_and_their_part_of_the_fitted_range() -> None:
    levels, counts = np.arange(1.0, 13.0), np.array([5, 9, 14, 30, 40, 50, 40, 30, 20, 15, 9, 8])
    ranks = np.repeat(np.cumsum(counts) - counts / 2, counts) / counts.sum()
    inside = np.clip(np.arange(1, 271) / 270, 0.1, 0.9) - np.clip(np.arange(270) / 270, 0.1, 0.9)
    line = np.polyfit(
        np.log(np.repeat(levels, counts)), np.log(-np.log(1 - ranks)), 1, w=np.sqrt(inside)
    )
    assert weibull.fit(weibull.Histogram.of_counts(levels, counts)).k == pytest.approx(
        line[0], rel=1e-12
    )


@pytest.mark.parametrize(
    ("draw", "n"),
    [("standard_normal", 1000), ("standard_normal", 20_000), ("standard_exponential", 4000)],
)
def test_the_standard_error_is_the_scatter_of_k_over_samples(draw: str, n: int) -> None:
    generator = np.random.default_rng(2)
    fits = [weibull.fit(getattr(generator, draw)(n)) for _ in range(300)]
    scatter = np.std([fit.k for fit in fits])
    stated = np.mean([fit.k_stderr for fit in fits])
    assert stated == pytest.approx(scatter, rel=0.15)  # 300 samples know the scatter to 4 %


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.empty(0), weibull.TOO_FEW),
        (half_normal(99), weibull.TOO_FEW),
        (np.full(500, np.nan), weibull.TOO_FEW),
        (np.append(half_normal(150), np.zeros(1500)), weibull.LEFT_OUT),
        (np.full(500, -0.3), weibull.CONSTANT),
        (np.repeat([1.0, 2, 3, 4], 100), weibull.FEW_POINTS),
        (np.append(np.full(1000, 1.0), half_normal(40)), weibull.FEW_POINTS),
        (np.arange(500), weibull.QUANTISED),
    ],
)
@pytest.mark.parametrize("method", ["exact", "binned"])
def test_no_fit_is_nan_with_a_reason(values: Floats, reason: str, method: str) -> None:
    fit = weibull.fit(values, method=method)
    assert fit.reason == reason
    assert np.isnan([fit.k, fit.lam, fit.r2, fit.ks, fit.k_stderr]).all()
    assert reason in weibull.REASONS


def test_few_levels_are_flagged_and_many_are_not() -> None:
    values = half_normal(10_000)
    assert weibull.fit(np.round(values * 20)).flags == (weibull.FEW_LEVELS,)
    assert weibull.fit(values).flags == ()
    assert weibull.fit(half_normal(100)).flags == ()


# npm-weibull-py 0.4.0 on the arrays of `protocol_sample`: k, lambda, R2, KS.
PROTOCOL = [
    ("weibull", "mid_80", 1.19985497052, 0.0200004135939, 0.999999996521, 0.00695710854434),
    ("weibull", "mid_90", 1.19985491851, 0.0200006760982, 0.999999993283, 0.00696289787987),
    ("weibull", "full_range", 1.19986473861, 0.0200009914753, 0.999999799015, 0.00696973291953),
    ("uniform", "mid_80", 1.36826721562, 0.610165733887, 0.984286715542, 0.142579895789),
    ("uniform", "mid_90", 1.34236050939, 0.596115886344, 0.976750325912, 0.137447185192),
    ("uniform", "full_range", 1.25638838692, 0.583053910952, 0.963511935141, 0.141862060681),
    ("zeros", "mid_80", 1.19990779464, 1.00008124793, 0.999999982805, 0.00699843248352),
    ("zeros", "mid_90", 1.19992264912, 1.00010114296, 0.999999978502, 0.00700707534345),
    ("zeros", "full_range", 1.20096015326, 0.999914374677, 0.999957220423, 0.00691519895975),
]


def protocol_sample(name: str) -> NDArray[np.float32]:
    if name == "uniform":
        return grid(20_000).astype(np.float32)
    plain = (-np.log1p(-grid(20_000))) ** (1 / 1.2)
    scaled = 0.02 * plain if name == "weibull" else np.where(np.arange(20_000) % 10 == 0, 0, plain)
    return scaled.astype(np.float32)


@pytest.mark.parametrize(("name", "trim", "k", "lambda_", "r2", "ks"), PROTOCOL)
def test_binned_reproduces_the_published_protocol(
    name: str, trim: str, k: float, lambda_: float, r2: float, ks: float
) -> None:
    fit = weibull.fit(protocol_sample(name), method="binned", trim=trim)
    assert (fit.k, fit.lam, fit.r2, fit.ks) == pytest.approx((k, lambda_, r2, ks), rel=1e-6)


def test_the_exact_fit_does_not_move_with_scale_where_the_binned_one_does() -> None:
    values = np.random.default_rng(3).standard_normal(100_000)
    small, large = (weibull.fit(values * scale) for scale in (0.02, 1.0))
    assert small.k == pytest.approx(large.k, rel=1e-7)
    assert small.lam == pytest.approx(0.02 * large.lam, rel=1e-7)
    binned = [weibull.fit(values * scale, method="binned").k for scale in (0.02, 1.0)]
    assert abs(binned[0] - binned[1]) > 1e-4


def test_fits_of_different_methods_do_not_compare() -> None:
    values = half_normal(1000)
    exact, binned = weibull.fit(values), weibull.fit(values, method="binned")
    other_trim = weibull.fit(values, trim="mid_90")
    assert weibull.comparable(exact.protocol, exact.protocol)
    assert not weibull.comparable(exact.protocol, other_trim.protocol)
    for other in (binned, other_trim):
        with pytest.raises(InputError, match="different methods"):
            weibull.difference(exact, other)
    change, error = weibull.difference(exact, weibull.fit(values**2))
    assert change == pytest.approx(-exact.k / 2) and error > exact.k_stderr


def test_unknown_methods_and_trims_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="'binned'"):
        weibull.fit(half_normal(200), method="mle")
    with pytest.raises(InputError, match="mid_80"):
        weibull.fit(half_normal(200), trim="mid_50")


def test_derive_of_no_parameters_is_empty() -> None:
    nothing = np.empty(0)
    arrays = dict.fromkeys(("numel", "sum", "sum_squares", "absmax", "values", "counts"), nothing)
    derived = weibull.derive({**arrays, "offsets": np.zeros(1, int), "reason": nothing})
    assert all(values.shape == (0,) for values in derived.values())
