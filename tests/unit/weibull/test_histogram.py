"""Counted magnitudes against sorting every value."""

import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynscope import weibull
from dynscope.errors import InputError
from dynscope.weibull import buckets
from dynscope.weibull import loops as loading
from dynscope.weibull.fits import _distance, _Line
from dynscope.weibull.histogram import EXACT_BELOW, SORTED_BELOW, Histogram, count

Array = NDArray[Any]

FLOATS = (
    np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz,
)  # fmt: skip
LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "in C order": lambda a: a,
    "in Fortran order": np.asfortranarray,
    "transposed": lambda a: a.T,
    "every second column": lambda a: a[:, ::2],
    "some rows, backwards": lambda a: a[40:3:-1, 5:],
    "stacked": lambda a: a.reshape(4, -1, a.shape[1])[1:3],
    "flat": lambda a: a.reshape(-1),
}


def sample(dtype: Any, n: int = 60 * 50, seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    values = random.standard_normal(n)
    values[random.integers(0, n, n // 20)] = 0
    values[random.integers(0, n, 3)] = np.nan
    if dtype not in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz):
        values[random.integers(0, n, 2)] = [np.inf, -np.inf]
    return values.astype(dtype).reshape(60, -1)


def twin(values: Array) -> tuple[Array, Array, int, int]:
    wide = values.astype(np.float64).reshape(-1)
    finite = wide[np.isfinite(wide)]
    levels, counts = np.unique(np.abs(finite[finite != 0]), return_counts=True)
    return levels, counts, int((finite == 0).sum()), int((~np.isfinite(wide)).sum())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: np.dtype(d).name)
def test_few_values_are_counted_as_sorting_does(dtype: Any, layout: str) -> None:
    values = LAYOUTS[layout](sample(dtype))
    found, (levels, counts, zeros, nonfinite) = count(values), twin(values)
    np.testing.assert_array_equal(found.levels, levels)
    np.testing.assert_array_equal(found.counts, counts)
    assert (found.zeros, found.nonfinite, found.total) == (zeros, nonfinite, values.size)
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert found.sum == pytest.approx(finite.sum(), rel=1e-12, abs=1e-12)
    assert found.sum_squares == pytest.approx((finite**2).sum(), rel=1e-12)
    assert found.absmax == np.abs(finite).max()
    assert found.finite == finite.size


@pytest.mark.parametrize("shape", [(0,), (0, 5), (1,), ()])
def test_next_to_nothing_is_counted_too(shape: tuple[int, ...]) -> None:
    for dtype in FLOATS:
        found = count(np.full(shape, 2.0).astype(dtype))
        assert found.n == int(np.prod(shape)) and found.absmax == (2.0 if found.n else 0)
        assert weibull.fit(found).reason == weibull.TOO_FEW


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8, bool, complex, ml_dtypes.int4])
def test_what_is_no_float_is_never_taken_for_weights(dtype: Any) -> None:
    found = count(np.ones((300, 300)).astype(dtype))
    assert found.reason == weibull.QUANTISED and found.total == 0
    assert weibull.fit(np.ones(500).astype(dtype)).reason == weibull.QUANTISED


@pytest.fixture(params=["compiled", "plain"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numba and as it is without."""
    monkeypatch.setattr(loading, "_counted", loading.WORTH_IT)
    if request.param == "plain":
        monkeypatch.setattr(loading, "compiled", lambda: None)
    else:
        assert loading.loops() is not None


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_many_values_are_counted_in_buckets_at_their_means(dtype: Any, layout: str) -> None:
    values = LAYOUTS[layout](sample(dtype, 60 * 20_000))
    found, (levels, counts, zeros, nonfinite) = count(values), twin(values)
    assert values.size > SORTED_BELOW and len(found.levels) < 50_000 < len(levels)
    assert (found.zeros, found.nonfinite, found.n) == (zeros, nonfinite, counts.sum())
    each = np.frexp(levels)[0].astype(np.float64) * 2**13 // 1 * 2.0 ** (np.frexp(levels)[1] - 13)
    _, place = np.unique(each, return_inverse=True)
    size = np.bincount(place, counts)
    np.testing.assert_array_equal(found.counts, size)
    means = np.bincount(place, counts * levels) / size
    np.testing.assert_allclose(found.levels, means, rtol=1e-13 if dtype == np.float32 else 2**-28)
    assert found.sum_squares == pytest.approx((counts * levels**2).sum(), rel=1e-12)
    wide = values.astype(np.float64)
    assert found.sum == pytest.approx(wide[np.isfinite(wide)].sum(), rel=1e-9)
    assert found.absmax == levels.max()


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_widest_range_is_counted_too(dtype: Any) -> None:
    info = np.finfo(dtype)
    few = np.array([0, info.smallest_subnormal, info.tiny / 3, info.tiny, 1, info.max, -info.max])
    with np.errstate(over="ignore"):
        found = count(np.repeat(few, 10_000).astype(dtype))
    lost = int(dtype == np.float64)  # the smallest of all: not one of the bits in use is set
    assert found.zeros == (1 + lost) * 10_000
    assert found.nonfinite == 0 and found.absmax == info.max
    np.testing.assert_allclose(found.levels, few[1 + lost : 6].astype(dtype), rtol=2**-28)
    np.testing.assert_array_equal(found.counts, [10_000] * (4 - lost) + [20_000])
    nothing = count(np.full(50_000, np.nan, dtype))
    assert (nothing.n, nothing.nonfinite, nothing.absmax, nothing.sum) == (0, 50_000, 0, 0)
    assert count(np.zeros(50_000, dtype)).zeros == 50_000


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_more_values_than_a_packed_bucket_holds(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = sample(dtype, 60 * 20_000)
    values[:30] = 0.7
    once = count(values)
    monkeypatch.setattr(buckets.Format, "most", 1 << 16)
    often = count(values)
    np.testing.assert_array_equal(often.counts, once.counts)
    np.testing.assert_allclose(often.levels, once.levels, rtol=1e-14)
    assert (often.zeros, often.nonfinite, often.sum) == (once.zeros, once.nonfinite, once.sum)


def test_a_packed_bucket_cannot_overflow() -> None:
    for form in buckets.FORMATS.values():
        largest_sum = form.most * ((1 << form.rest) - 1)
        assert largest_sum < 1 << form.sum_bits and (form.most << form.sum_bits) - 1 < 1 << 64


SHAPES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda g, n: g.standard_normal(n),
    "Laplace": lambda g, n: g.laplace(size=n),
    "uniform": lambda g, n: g.uniform(-1, 1, n),
    "Cauchy": lambda g, n: g.standard_cauchy(n),
    "log-normal": lambda g, n: np.exp(3 * g.standard_normal(n)),
    "half zeros": lambda g, n: g.standard_normal(n) * (g.random(n) < 0.5),
    "quantized in groups": lambda g, n: (
        np.round(30 * g.standard_normal((n // 32, 32))) * np.exp(g.standard_normal((n // 32, 1)))
    ),
    "around 1": lambda g, n: 1 + 0.1 * g.standard_normal(n),
    "half at 1": lambda g, n: np.where(g.random(n) < 0.5, 1 + 1e-5 * g.standard_normal(n), g.random(n)),
    "bfloat16 before": lambda g, n: g.standard_normal(n).astype(ml_dtypes.bfloat16),
}  # fmt: skip


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1024, 40_000, 300_000])
def test_below_a_million_the_fit_is_that_of_sorting(shape: str, n: int) -> None:
    values = (0.02 * SHAPES[shape](np.random.default_rng(n), n).astype(np.float64)).astype(
        np.float32
    )
    exact = Histogram.of_counts(*np.unique(np.abs(values), return_counts=True))
    for trim in weibull.TRIMS:
        found, sorted_ = weibull.fit(values, trim=trim), weibull.fit(exact, trim=trim)
        assert found.n == sorted_.n
        assert found.k == pytest.approx(sorted_.k, rel=3e-7)
        assert found.lam == pytest.approx(sorted_.lam, rel=1e-7)
        assert found.r2 == pytest.approx(sorted_.r2, abs=1e-7)
        assert found.ks == pytest.approx(sorted_.ks, abs=2e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [100, 3000, 200_000])
def test_with_and_without_numba_the_fit_is_one(
    shape: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = SHAPES[shape](np.random.default_rng(n), n // 32 * 32).astype(np.float32)
    monkeypatch.setattr(loading, "_counted", loading.WORTH_IT)
    compiled = [weibull.fit(values, trim=trim) for trim in weibull.TRIMS]
    monkeypatch.setattr(loading, "compiled", lambda: None)
    for one, trim in zip(compiled, weibull.TRIMS, strict=True):
        plain = weibull.fit(values, trim=trim)
        for name, value in vars(plain).items():
            if isinstance(value, float):
                value = pytest.approx(value, rel=1e-9, nan_ok=True)
            assert getattr(one, name) == value, name


@pytest.mark.parametrize("shape", SHAPES)
def test_the_distance_is_found_without_looking_at_every_level(shape: str) -> None:
    values = SHAPES[shape](np.random.default_rng(1), 30_016).astype(np.float64)
    levels, counts = np.unique(np.abs(values[values != 0]), return_counts=True)
    histogram, ranks = Histogram.of_counts(levels, counts), np.cumsum(counts)
    compiled = loading.compiled()
    assert compiled is not None
    for k, factor in ((0.5, 1.0), (1.2, 0.8), (3.0, 1.5)):
        lam = factor * float(np.median(levels))
        after, before = np.append(levels[1:], np.inf), np.append(-levels[0], levels[:-1])
        end = np.minimum(levels * (1 + 2**-8), (levels + after) / 2)
        start = np.maximum(levels * (1 - 2**-8), (levels + before) / 2)
        fitted = [1 - np.exp(-((x / lam) ** k)) for x in (end, start)]
        apart = [ranks / ranks[-1] - fitted[0], (ranks - counts) / ranks[-1] - fitted[1]]
        expected = np.abs(apart).max()
        assert _distance(histogram, ranks, _Line(k, lam, 1.0)) == pytest.approx(expected, rel=1e-12)
        assert compiled.distance(levels, counts, ranks, k, lam) == pytest.approx(
            expected, rel=1e-12
        )


def test_numba_is_imported_only_for_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_counted", 0)
    assert loading.loops(loading.WORTH_IT - 1) is None and loading.loops() is None
    assert loading.loops(1) is not None and loading.loops() is not None


@pytest.mark.parametrize("n", [5000, 50_000])
def test_the_other_byte_order_is_read_too(n: int) -> None:
    for dtype in ("f2", "f4", "f8"):
        values = np.random.default_rng(0).standard_normal(n).astype(dtype)
        assert weibull.fit(values.astype(f">{dtype}")) == weibull.fit(values)


def test_what_a_mask_hides_is_left_out_and_a_matrix_is_an_array() -> None:
    values = np.random.default_rng(0).standard_normal((40, 50))
    hidden = np.ma.MaskedArray(values, np.abs(values) > 1)
    assert count(hidden).n == (np.abs(values) <= 1).sum()
    assert weibull.fit(hidden) == weibull.fit(hidden.compressed())
    with warnings.catch_warnings(action="ignore"):
        assert weibull.fit(np.matrix(values)) == weibull.fit(values)


def test_weights_that_hardly_differ_are_constant_without_a_warning() -> None:
    random = np.random.default_rng(0)
    for values in (1 + 1e-6 * random.standard_normal((300, 300)), 1 + 1e-4 * random.random(2000)):
        assert weibull.fit(values).reason == weibull.CONSTANT
    assert weibull.fit(1 + 0.01 * random.standard_normal(2000)).k > 50


def test_the_gini_coefficient_of_very_many_weights() -> None:
    histogram = Histogram.of_counts(np.arange(1.0, 17), np.full(16, 10**9))
    assert weibull.ratios(histogram).gini == pytest.approx(0.3125, rel=1e-9)


def test_the_binned_protocol_has_a_standard_error_too() -> None:
    values = np.random.default_rng(0).standard_normal(200_000)
    binned, exact = weibull.fit(values, method="binned"), weibull.fit(values)
    assert binned.k_stderr == pytest.approx(exact.k_stderr, rel=0.06)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_condensed_histogram_is_small_and_fits_alike(dtype: Any) -> None:
    whole = count((0.02 * np.random.default_rng(0).standard_normal(300_000)).astype(dtype))
    small = whole.condensed()
    assert len(small.levels) <= 6000 and small.n == whole.n and small.sum == whole.sum
    assert weibull.fit(small).k == pytest.approx(weibull.fit(whole).k, abs=2e-6)
    assert weibull.fit(small).lam == pytest.approx(weibull.fit(whole).lam, rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(FLOATS), st.integers(1, 3000), st.integers(0, 3000), st.integers(0, 99))
def test_the_sum_of_two_is_the_histogram_of_both(dtype: Any, n: int, m: int, seed: int) -> None:
    values = sample(dtype, seed=seed).reshape(-1)
    other = sample(np.float32, seed=seed + 1).reshape(-1)[:m]
    both = count(values[:n], binned=True) + count(other, binned=True)
    together = np.concatenate([values[:n].astype(np.float64), other.astype(np.float64)])
    whole = count(together, binned=True)
    for name in ("levels", "counts", "log_bins"):
        np.testing.assert_array_equal(getattr(both, name), getattr(whole, name))
    assert (both.zeros, both.nonfinite, both.absmax) == (whole.zeros, whole.nonfinite, whole.absmax)
    assert both.sum == pytest.approx(whole.sum, abs=1e-9)


def test_a_sum_of_many_stays_small_and_right() -> None:
    random = np.random.default_rng(0)
    parts = [(0.02 * random.standard_normal(300_000)).astype(np.float32) for _ in range(6)]
    together = count(parts[0])
    for part in parts[1:]:
        together = together + count(part)
    assert len(together.levels) < 2**17
    assert together.n == sum(part.size for part in parts)
    exact = Histogram.of_counts(*np.unique(np.abs(np.concatenate(parts)), return_counts=True))
    assert weibull.fit(together).k == pytest.approx(weibull.fit(exact).k, abs=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: np.dtype(d).name)
def test_it_travels_as_bytes(dtype: Any) -> None:
    for binned in (True, False):
        found = count(sample(dtype), binned)
        again = Histogram.from_bytes(found.to_bytes())
        for name, value in vars(found).items():
            np.testing.assert_array_equal(getattr(again, name), value)
    refused = count(np.ones(3, int))
    assert Histogram.from_bytes(refused.to_bytes()).reason == weibull.QUANTISED


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=40), st.integers(0, 400))
def test_damaged_bytes_are_refused(junk: bytes, place: int) -> None:
    packed = count(sample(np.float16)).to_bytes()
    damaged = packed[:place] + junk + packed[place + len(junk) + 1 :]
    for bad in (junk, packed[: place % len(packed)], damaged):
        with pytest.raises(InputError, match="no packed histogram"):
            Histogram.from_bytes(bad)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_a_memory_mapped_tensor_is_never_loaded_whole(tmp_path: Path, dtype: Any) -> None:
    random = np.random.default_rng(0)
    values = (0.02 * random.standard_normal((2500, 4000))).astype(dtype)
    values.view(f"u{values.itemsize}").tofile(tmp_path / "w")
    raw = np.memmap(tmp_path / "w", f"u{values.itemsize}", "r", shape=values.shape)
    tracemalloc.start()
    found = count(raw.view(dtype))
    parts = count(raw.view(dtype)[:, 100:1000])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 18e6 < values.nbytes
    assert found.n == np.count_nonzero(values) and parts.total == 2500 * 900


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_a_million_narrow_values_are_counted_as_they_are(dtype: Any, layout: str) -> None:
    values = LAYOUTS[layout](sample(dtype, 60 * 50_000))
    found, (levels, counts, zeros, nonfinite) = count(values), twin(values)
    assert values.size >= EXACT_BELOW
    np.testing.assert_array_equal(found.levels, levels)
    np.testing.assert_array_equal(found.counts, counts)
    assert (found.zeros, found.nonfinite) == (zeros, nonfinite)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16], ids=lambda d: d.__name__)
def test_with_and_without_numba_all_is_equal(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = sample(dtype, 60 * 20_000)
    monkeypatch.setattr(loading, "_counted", loading.WORTH_IT)
    found = count(values)
    monkeypatch.setattr(loading, "compiled", lambda: None)
    plain = count(values)
    for name in ("levels", "sum", "sum_squares"):
        np.testing.assert_allclose(getattr(found, name), getattr(plain, name), rtol=1e-12)
    for name in ("counts", "zeros", "nonfinite", "absmax"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))


def test_log_bins_are_those_of_every_value_however_many() -> None:
    random = np.random.default_rng(1)
    values = (3e-3 * random.standard_normal(1_200_000)).astype(np.float32)
    whole = weibull.fit(values, method="binned")
    exact = Histogram.of_counts(*np.unique(np.abs(values), return_counts=True))
    assert whole.k == pytest.approx(weibull.fit(exact, method="binned").k, rel=1e-12)
