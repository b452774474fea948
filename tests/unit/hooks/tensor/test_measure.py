"""Each fast reduction against a slow, obvious twin in numpy float64."""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dynscope.analysis.sums import BINS, bin_edges, derive, median_of_histogram
from dynscope.errors import DynscopeError
from dynscope.hooks.tensor import reduce
from dynscope.hooks.tensor.fused import Compilation
from dynscope.hooks.tensor.measure import Measure, Observed
from dynscope.hooks.tensor.tally import Tally, locate

FUSED = Compilation.shared()
FUSED.poll(wait=True)


ENGINES = [
    pytest.param(
        FUSED, id="fused", marks=pytest.mark.skipif(FUSED.library is None, reason=FUSED.reason)
    ),
    pytest.param(Compilation(wanted=False), id="eager"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def metrics(*measured: Observed | Callable[[], Observed]) -> dict[str, Any]:
    """What one site's row becomes; measured one after the other where callables are given."""
    tally = Tally(1, 0, 0, {}, torch.device("cpu"))
    for one in measured:
        (one if isinstance(one, Observed) else one()).add_to(tally, 0)
    arrays = tally.drain()() | {
        "columns": np.array([0]),
        "branch": np.array([-1]),
        "residual": np.array([-1]),
        "numel": np.array([]),
    }
    return {name: value[0] for name, value in derive(arrays).items() if len(value)}


def close(got: Any, wanted: Any, relative: float = 1e-5) -> bool:
    return math.isclose(float(got), float(wanted), rel_tol=relative, abs_tol=1e-30)


def inputs(dtype: torch.dtype) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(1)
    for shape in [(7,), (1, 1), (3, 5), (2, 3, 4), (4, 129, 33), (2, 300, 2500), (2, 3, 8, 8)]:
        yield (torch.randn(shape, generator=random) * 3 + 0.5).to(dtype)
    yield (torch.randn(64, 700, generator=random) * 400).to(dtype)  # fp16 variance overflows
    yield torch.relu(torch.randn(50, 300, generator=random)).to(dtype)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_statistics_equal_numpy(engine: Compilation, dtype: torch.dtype) -> None:
    measure = Measure(engine)
    for x in inputs(dtype):
        wide = x.double().numpy()
        got = metrics(measure.output(x, None, "btc"))
        rms = math.sqrt((wide**2).mean())
        assert abs(got["activation/mean"] - wide.mean()) <= 1e-5 * rms
        assert close(got["activation/variance"], wide.var(), 1e-5) or x.numel() == 1
        assert close(got["activation/rms"], rms)
        assert close(got["activation/absmax"], np.abs(wide).max())
        assert close(got["activation/mean_abs"], np.abs(wide).mean())
        assert got["activation/zero_fraction"] == (wide == 0).mean()
        assert got["activation/nonfinite_count"] == 0
        assert got["activation/count"] == x.numel()
        assert got["activation/n_calls"] == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_variance_survives_a_large_mean(engine: Compilation) -> None:
    x = (1000 + 0.01 * torch.randn(64, 512, dtype=torch.float64)).float()
    got = metrics(Measure(engine).output(x, None, "btc"))
    assert close(got["activation/variance"], x.double().numpy().var(), 1e-4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_median_is_within_one_percent(engine: Compilation, scale: float) -> None:
    x = torch.randn(37, 41, 101) * scale
    got = metrics(Measure(engine).output(x, None, "btc"))
    assert close(got["activation/median_abs"], x.abs().median(), 0.01)
    ratio = x.abs().max() / x.abs().median()
    assert close(got["activation/massive_ratio"], ratio, 0.01)


def test_histograms_of_both_engines_are_equal() -> None:
    if FUSED.library is None:
        pytest.skip(FUSED.reason)
    x = torch.randn(64, 999) * torch.logspace(-30, 30, 999)
    x[0, :5] = torch.tensor([0.0, -0.0, torch.nan, torch.inf, 1e-45])
    for stride in (1, 7):
        tally = Tally(1, 0, 0, {}, torch.device("cpu"))
        FUSED.library.observe(x, None, stride)
        FUSED.library.add_to(tally.address(0, tuple(x.shape), "btc"), True)
        fused = tally.histogram[0].numpy()
        assert np.array_equal(fused, reduce.histogram(x, stride).numpy())
        by_edges = np.abs(x.flatten()[::stride].double().numpy())
        by_edges = by_edges[np.isfinite(by_edges)]
        place = np.clip(np.searchsorted(bin_edges(), by_edges, side="right") - 1, 0, BINS - 1)
        assert np.array_equal(fused, np.bincount(place, minlength=BINS))


def test_three_medians_agree() -> None:
    counts = reduce.histogram(torch.randn(1000) * 3, 1)
    assert close(reduce.median(counts), median_of_histogram(counts.numpy())[0], 1e-12)
    empty = torch.zeros(BINS, dtype=torch.int32)
    assert np.isnan(median_of_histogram(empty.numpy())[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_ratio_is_missing_when_most_elements_are_zero(engine: Compilation) -> None:
    x = torch.relu(torch.randn(100, 100) - 0.3)
    assert (x == 0).double().mean() > 0.5
    assert np.isnan(metrics(Measure(engine).output(x, None, "btc"))["activation/massive_ratio"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_top_three_have_value_channel_token_and_batch(
    engine: Compilation, dtype: torch.dtype
) -> None:
    x = torch.randn(3, 50, 64).to(dtype)
    planted = {(1, 7, 9): 900.0, (2, 49, 63): -1000.0, (0, 0, 0): 800.0}
    for place, value in planted.items():
        x[place] = value
    x[1, 1, 1] = torch.nan
    got = metrics(Measure(engine).output(x, None, "btc"))
    assert got["massive/value"].tolist() == [-1000.0, 900.0, 800.0]
    assert got["massive/channel"].tolist() == [63, 9, 0]
    assert got["massive/token"].tolist() == [49, 7, 0]
    assert got["massive/batch"].tolist() == [2, 1, 0]


@pytest.mark.parametrize("engine", ENGINES)
def test_massive_elements_are_counted_by_the_published_rule(engine: Compilation) -> None:
    x = 0.3 * torch.randn(4, 300, 64)
    x[0, 0, 0], x[1, 5, 7] = 500.0, -450.0
    assert metrics(Measure(engine).output(x, None, "btc"))["activation/massive_count"] == 2
    y = 1.5 * torch.randn(4, 300, 64)  # median about 1: 150 is not a thousand times larger
    y[0, 0, 0] = 150.0
    assert metrics(Measure(engine).output(y, None, "btc"))["activation/massive_count"] == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_angular_distance_equals_the_slow_twin(engine: Compilation, dtype: torch.dtype) -> None:
    x = torch.randn(4, 30, 96).to(dtype)
    for noise in (1e-2, 0.3, 3.0):
        y = (x.float() + noise * torch.randn(4, 30, 96)).to(dtype)
        a, b = y.double().flatten(0, 1), x.double().flatten(0, 1)
        cosine = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
        angle = torch.arccos(cosine.clamp(-1, 1)).mean() / math.pi
        got = metrics(Measure(engine).output(y, x, "btc"))
        assert close(got["activation/angular_distance"], angle)
        assert close(got["activation/cosine_to_input"], cosine.mean())


@pytest.mark.parametrize("engine", ENGINES)
def test_angular_distance_has_its_exact_values(engine: Compilation) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 0.5]])
    orthogonal = torch.tensor([[2.0, -1.0, 0.0, 0.0]])
    for y, wanted in ((2 * x, 0.0), (-x, 1.0), (orthogonal, 0.5)):
        got = metrics(Measure(engine).output(y, x, "btc"))["activation/angular_distance"]
        assert abs(got - wanted) < 1e-7
    zero = metrics(Measure(engine).output(x, torch.zeros_like(x), "btc"))
    assert np.isnan(zero["activation/angular_distance"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_statistics_equal_numpy(engine: Compilation, dtype: torch.dtype) -> None:
    for x in inputs(dtype):
        wide = x.double().numpy()
        got = metrics(Measure(engine).gradient(x))
        assert close(got["activation_gradient/norm"], np.linalg.norm(wide.ravel()))
        assert close(got["activation_gradient/rms"], math.sqrt((wide**2).mean()))
        assert close(got["activation_gradient/absmax"], np.abs(wide).max())
        assert got["activation_gradient/nonfinite_count"] == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_vanishing_gradients_do_not_underflow(engine: Compilation) -> None:
    g = torch.randn(128, 128) * 1e-30
    got = metrics(Measure(engine).gradient(g))["activation_gradient/norm"]
    assert close(got, np.linalg.norm(g.double().numpy()))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("bad", "absmax"), [(math.nan, math.nan), (math.inf, math.inf)])
def test_nonfinite_values_are_counted_and_stay_visible(
    engine: Compilation, bad: float, absmax: float
) -> None:
    x = torch.randn(20, 30)
    x[3, 4] = bad
    measure = Measure(engine)
    got = metrics(measure.output(x, None, "btc"), measure.gradient(x))
    assert got["activation/nonfinite_count"] == 1
    assert got["activation_gradient/nonfinite_count"] == 1
    assert not math.isfinite(got["activation/variance"])
    assert str(float(got["activation/absmax"])) == str(absmax)
    assert str(float(got["activation_gradient/absmax"])) == str(absmax)
    finite = x[torch.isfinite(x)].abs()
    assert close(got["activation/median_abs"], finite.median(), 0.02)
    # a NaN is sticky, whatever comes before or after it
    clean = torch.randn(20, 30)
    for order in itertools.permutations([x, clean]):
        merged = metrics(*(partial(measure.output, t, None, "btc") for t in order))
        assert str(float(merged["activation/absmax"])) == str(absmax)


@pytest.mark.parametrize("engine", ENGINES)
def test_calls_of_one_step_merge_as_if_they_were_one(engine: Compilation) -> None:
    measure = Measure(engine, full=True)
    parts = [torch.randn(2, 40, 32) * scale + scale for scale in (0.1, 1.0, 10.0)]
    apart = metrics(*(partial(measure.output, p, None, "btc") for p in parts))
    whole = metrics(measure.output(torch.cat(parts), None, "btc"))
    for name in (
        "mean", "variance", "rms", "absmax", "mean_abs", "median_abs", "kurtosis", "count",
    ):  # fmt: skip
        assert close(apart[f"activation/{name}"], whole[f"activation/{name}"], 1e-6)
    assert apart["activation/n_calls"] == 3
    assert apart["massive/value"].tolist() == whole["massive/value"].tolist()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_full_bundle_adds_exact_statistics(engine: Compilation) -> None:
    x = torch.randn(4, 20, 64) + 0.3
    x[0, 0, 0] = 7e4
    wide = x.double().numpy()
    got = metrics(Measure(engine, full=True).output(x, None, "btc"))
    centred = wide - wide.mean()
    kurtosis = (centred**4).mean() / (centred**2).mean() ** 2
    energy = (wide.mean(-1) ** 2 / (wide**2).mean(-1)).mean()
    assert close(got["activation/kurtosis"], kurtosis)
    assert close(got["activation/channel_mean_energy"], energy)
    assert got["activation/fp16_overflow_fraction"] == 1 / x.numel()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_output_is_a_call_without_values(engine: Compilation) -> None:
    measure = Measure(engine)
    got = metrics(measure.output(torch.zeros(0, 8), None, "btc"))
    assert got["activation/n_calls"] == 1
    assert got["activation/count"] == 0
    assert np.isnan(got["activation/variance"])
    assert got["massive/channel"].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("layout", "shape", "wanted"),
    [
        ("btc", (2, 5, 7), (3, 4, 1)),
        ("tbc", (5, 2, 7), (3, 4, 1)),
        ("bct", (2, 7, 5), (3, 4, 1)),
        ("bct", (2, 7, 3, 5), (3, 11, 1)),
        ("btc", (2, 7), (3, -1, 1)),
        ("btc", (7,), (3, -1, -1)),
    ],
)
def test_a_flat_index_is_located(
    layout: str, shape: tuple[int, ...], wanted: tuple[int, int, int]
) -> None:
    channel, token, batch = wanted
    place: tuple[int, ...] = (batch, token, channel)
    if len(shape) < 3:
        place = (batch, channel)[-len(shape) :]
    elif layout == "tbc":
        place = (token, batch, channel)
    elif layout == "bct":
        place = (batch, channel, *divmod(token, shape[3])) if len(shape) == 4 else (1, 3, 4)
    flat = int(np.ravel_multi_index(place, shape))
    assert locate(torch.tensor([flat]), shape, layout).tolist() == [list(wanted)]


def test_the_sample_visits_every_channel_equally() -> None:
    for shape in [(8, 256, 384), (8, 256, 1536), (2, 2048, 4096)]:
        stride = reduce.sample_stride(shape)
        size = math.prod(shape)
        assert size // stride >= reduce.AT_LEAST
        assert all(math.gcd(stride, length) == 1 for length in shape)
        channels = np.bincount(np.arange(0, size, stride) % shape[-1])
        assert channels.max() - channels.min() <= 1
        sparse = reduce.sparse_stride(size, shape, 2**15)
        assert math.ceil(size / sparse) <= 2**15


def test_a_result_of_the_fused_reduction_is_refused_after_the_next_one() -> None:
    if FUSED.library is None:
        pytest.skip(FUSED.reason)
    measure = Measure(FUSED)
    first = measure.output(torch.randn(4, 5), None, "btc")
    measure.output(torch.randn(4, 5), None, "btc")
    with pytest.raises(DynscopeError, match="overwritten"):
        metrics(first)


def test_threads_share_the_fused_reduction_without_changing_a_number() -> None:
    if FUSED.library is None:
        pytest.skip(FUSED.reason)
    x, y = torch.randn(4, 300, 96), torch.randn(4, 300, 96)
    x[3, 299, 95] = 2e3
    measure, before = Measure(FUSED), torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            measured = (partial(measure.output, x, y, "btc"), partial(measure.gradient, y))
            found.append(metrics(*measured))
        finally:
            torch.set_num_threads(before)
    for other in found[1:]:
        for name, value in found[0].items():
            assert np.allclose(other[name], value, rtol=1e-12, atol=1e-12, equal_nan=True), name
