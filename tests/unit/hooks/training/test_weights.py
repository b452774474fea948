"""What is taken from weights, against numpy on the same tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dynscope import weibull
from dynscope.hooks.training import weights

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def gaussian(*shape: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def derived(*tensors: torch.Tensor) -> Mapping[str, NDArray[Any]]:
    return weibull.derive(weights.collect([(f"w{i}", t) for i, t in enumerate(tensors)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(100, 120), (600, 700)])
def test_sums_and_fit_are_those_of_the_sorted_float64_weights(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    tensor = gaussian(*shape).to(dtype)
    row = {name: values[0] for name, values in derived(tensor).items()}
    twin = tensor.double().numpy()
    assert row["weight/norm"] == pytest.approx(np.linalg.norm(twin), rel=1e-12)
    assert row["weight/rms"] == pytest.approx(np.sqrt(np.mean(twin**2)), rel=1e-12)
    assert row["weight/absmax"] == np.abs(twin).max()
    assert row["weight/mean"] == pytest.approx(twin.mean(), abs=1e-15)
    fit = weibull.fit(twin)
    assert row["weight/weibull_k"] == pytest.approx(fit.k, rel=2e-5)
    assert row["weight/weibull_lambda"] == pytest.approx(fit.lam, rel=2e-5)
    assert row["weight/weibull_r2"] == pytest.approx(fit.r2, abs=2e-5)
    assert row["weight/weibull_ks"] == pytest.approx(fit.ks, abs=2e-4)
    assert row["weight/weibull_n"] == fit.n
    assert row["weight/zero_fraction"] == fit.zero_fraction
    error = row["weight/weibull_k_standard_error"]
    assert error == pytest.approx(fit.k_stderr, rel=1e-2)


@pytest.mark.parametrize("scale", [1.0, 0.02, 0.05 / 3])
@pytest.mark.parametrize("shape", ["standard_normal", "random", "standard_exponential"])
def test_k_from_counts_is_within_1e_5_of_the_sorted_plot_at_a_million(
    shape: str, scale: float
) -> None:
    generator = np.random.default_rng(0)
    draw: Callable[[int], NDArray[np.float64]] = getattr(generator, shape)
    values = (draw(10**6) * scale).astype(np.float32)
    k = derived(torch.from_numpy(values.reshape(1000, 1000)))["weight/weibull_k"][0]
    assert k == pytest.approx(weibull.fit(values).k, abs=1e-5)


def test_small_parameters_keep_every_magnitude() -> None:
    tensor = gaussian(128, 128)
    arrays = weights.collect([("w", tensor)])
    assert np.sort(arrays["values"]) == pytest.approx(np.sort(tensor.abs().flatten().numpy()), 0)
    assert derived(tensor)["weight/weibull_k"][0] == weibull.fit(tensor.numpy()).k


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_counted_exactly(dtype: torch.dtype) -> None:
    tensor = gaussian(300, 300).to(dtype)
    arrays = weights.collect([("w", tensor)])
    values, counts = np.unique(tensor.float().abs().numpy(), return_counts=True)
    assert np.array_equal(arrays["values"], values) and np.array_equal(arrays["counts"], counts)
    # The same values held in float32 after loading: bfloat16's are still exact.
    if dtype == torch.bfloat16:
        upcast = weights.collect([("w", tensor.float())])
        assert np.array_equal(upcast["values"], values)
        assert np.array_equal(upcast["counts"], counts)


def test_float32_values_are_counted_at_the_nearest_of_256_per_octave() -> None:
    tensor = gaussian(200, 200)
    arrays = weights.collect([("w", tensor)])
    mantissa, exponent = np.frexp(tensor.abs().double().numpy())
    nearest = np.ldexp(np.floor(mantissa * 512 + 0.5) / 512, exponent)
    values, counts = np.unique(nearest, return_counts=True)
    assert np.array_equal(arrays["values"], values) and np.array_equal(arrays["counts"], counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [90, 200])
def test_values_that_are_not_finite_are_counted_and_left_out(size: int, dtype: torch.dtype) -> None:
    tensor = gaussian(size, size).to(dtype)
    tensor[0, :4] = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf")])
    tensor[1, :3] = 0
    every_bit = torch.full((1,), -1, dtype=torch.int32).view(torch.float32)  # a NaN all of ones
    if dtype == torch.float32:
        tensor[2, 0] = every_bit[0]
    twin = tensor.double().numpy()
    finite = twin[np.isfinite(twin)]
    row = {name: values[0] for name, values in derived(tensor).items()}
    assert row["weight/nonfinite_count"] == twin.size - finite.size
    assert row["weight/zero_fraction"] == np.mean(twin == 0)
    assert row["weight/norm"] == pytest.approx(np.linalg.norm(finite), rel=1e-12)
    assert row["weight/rms"] == pytest.approx(np.sqrt(np.mean(finite**2)), rel=1e-12)
    assert row["weight/absmax"] == np.abs(finite).max()
    assert row["weight/weibull_k"] == pytest.approx(weibull.fit(finite).k, rel=1e-4)


def test_layout_in_memory_does_not_matter() -> None:
    tensor = gaussian(300, 200)
    plain, turned, strided = derived(
        tensor, tensor.t(), torch.stack([tensor, tensor], dim=-1)[..., 0]
    )["weight/weibull_k"]
    assert plain == turned == strided


def test_a_row_keeps_its_place_whatever_stands_beside_it() -> None:
    tensors = [gaussian(150, 150), torch.ones(7), gaussian(40, 40), torch.empty(0, 8)]
    together = derived(*tensors)
    for index, tensor in enumerate(tensors):
        for name, values in derived(tensor).items():
            assert together[name][index] == pytest.approx(values[0], nan_ok=True, rel=0), name


def reason(tensor: torch.Tensor) -> str:
    row = derived(tensor)
    assert np.isnan(row["weight/weibull_k"][0])
    return weibull.REASONS[int(row["weight/weibull_reason"][0])]


def test_what_cannot_be_fitted_says_why() -> None:
    assert reason(torch.ones(500)) == weibull.NOT_A_MATRIX
    assert reason(torch.tensor(0.3)) == weibull.NOT_A_MATRIX
    assert reason(torch.ones(500, 500)) == weibull.CONSTANT
    assert reason(torch.empty(0, 8)) == weibull.TOO_FEW
    assert reason(gaussian(500, 500).relu().mul(gaussian(500, 500, seed=1) > 0.03)) == (
        weibull.LEFT_OUT
    )
    assert reason(torch.randint(0, 255, (64, 64), dtype=torch.uint8)) == weibull.QUANTISED
    assert reason(gaussian(64, 64).to(torch.float8_e4m3fn)) == weibull.QUANTISED
    assert reason(torch.randn(64, 64, dtype=torch.complex64)) == weibull.QUANTISED
    assert reason(gaussian(64, 64).to_sparse()) == weibull.SPARSE
    assert reason(torch.empty(64, 64, device="meta")) == weibull.NO_VALUES
    assert reason(torch.nn.LazyLinear(4).weight) == weibull.NO_VALUES


def test_the_mean_of_a_one_element_parameter_is_its_value() -> None:
    row = derived(torch.nn.Parameter(torch.tensor(-0.75)))
    assert row["weight/mean"][0] == -0.75
    assert row["weight/norm"][0] == row["weight/absmax"][0] == 0.75


def test_taking_weights_leaves_no_trace() -> None:
    parameter = torch.nn.Parameter(gaussian(200, 200))
    before, version = parameter.detach().clone(), parameter._version
    state = torch.random.get_rng_state()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"):  # a user's default device does not reach our tensors
            arrays = weights.collect([("w", parameter)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(parameter, before) and parameter._version == version
    assert parameter.grad is None and arrays["numel"][0] == 40_000


def test_arrays_are_plain_and_small() -> None:
    arrays = weights.collect([("w", gaussian(1000, 1000))])
    assert all(type(values) is np.ndarray and values.dtype != object for values in arrays.values())
    assert sum(values.nbytes for values in arrays.values()) < 64 * 1024


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_gives_the_counts_of_the_cpu(dtype: torch.dtype) -> None:
    tensors = [("small", gaussian(64, 64).to(dtype)), ("large", gaussian(700, 700).to(dtype))]
    here = weights.collect(tensors)
    there = weights.collect([(name, tensor.cuda()) for name, tensor in tensors])
    for name, values in here.items():
        assert there[name] == pytest.approx(values, rel=1e-12), name
