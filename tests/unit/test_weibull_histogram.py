"""Counted magnitudes against sorting every value."""

import tracemalloc
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
from dynscope.weibull import histogram
from dynscope.weibull.histogram import EXACT_BELOW, Histogram, count

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
def test_fewer_than_a_million_values_are_counted_as_sorting_does(dtype: Any, layout: str) -> None:
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
    if request.param == "plain":
        monkeypatch.setattr(histogram, "_loops", lambda: None)
    else:
        assert histogram._loops() is not None


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_million_values_are_counted_within_a_512th_each(dtype: Any) -> None:
    values = sample(dtype, 60 * 20_000)
    found, (levels, counts, zeros, nonfinite) = count(values), twin(values)
    assert values.size >= EXACT_BELOW and len(found.levels) < 50_000 < len(levels)
    assert (found.zeros, found.nonfinite, found.n) == (zeros, nonfinite, counts.sum())
    every, near = np.repeat(levels, counts), np.repeat(found.levels, found.counts)
    assert np.abs(near / every - 1).max() <= 2**-9 * 1.001
    assert found.sum_squares == pytest.approx((every**2).sum(), rel=1e-12)


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
    found = count(values)
    monkeypatch.setattr(histogram, "_loops", lambda: None)
    plain = count(values)
    for name, value in vars(found).items():
        if name in ("sum", "sum_squares"):
            assert value == pytest.approx(getattr(plain, name), rel=1e-12)
        else:
            np.testing.assert_array_equal(value, getattr(plain, name))


def test_log_bins_are_those_of_every_value_however_many() -> None:
    random = np.random.default_rng(1)
    values = (3e-3 * random.standard_normal(1_200_000)).astype(np.float32)
    whole = weibull.fit(values, method="binned")
    exact = Histogram.of_counts(*np.unique(np.abs(values), return_counts=True))
    assert whole.k == pytest.approx(weibull.fit(exact, method="binned").k, rel=1e-12)
