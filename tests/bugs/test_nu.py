"""Numbers and dtypes of live models; one test per reported case."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynscope
from tests.live import failures, parameter, reasons, site, squares, train

pytestmark = pytest.mark.usefixtures("quick_writer")
OPTIONS: dict[str, Any] = {"every": 1, "sites": "leaves", "summary": False}


class Giving(nn.Module):
    """Gives a set output, whatever comes in."""

    def __init__(self, **outputs: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.values = outputs
        self.parts = nn.ModuleList(nn.Identity() for _ in outputs)

    def forward(self, _: Any) -> Any:
        total = self.gain.sum()
        for part, value in zip(self.parts, self.values.values(), strict=True):
            given = part(value * self.gain.to(value.dtype))
            total = total + given.double().nan_to_num(0, 0, 0).mean()
        return total


@pytest.mark.parametrize("engine", ["fused", "eager"])
def test_nu_01_03_05_overflow_and_nonfinite_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    if engine == "eager":
        monkeypatch.setenv("DYNSCOPE_FUSED", "0")
    torch.manual_seed(0)
    wide = torch.randn(64, 64) * 400
    one = torch.randn(4, 8)
    one[0, 0], one[1, 1] = math.nan, math.inf
    infinities = torch.full((2, 2), math.inf)
    model = Giving(
        half=wide.half(), brain=wide.bfloat16(), one=one, all=torch.full((2, 2), math.nan),
        first=torch.tensor([math.nan, 1.0]), last=torch.tensor([1.0, math.nan]),
        infinite=infinities, minus=-infinities,
    )  # fmt: skip
    # Each is called twice in a step, once with the other sign: inf and -inf are added up.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for bundle in ("standard", "full"):
        path = tmp_path / f"{bundle}.h5"
        with dynscope.attach(model, path, optimizer=optimizer, metrics=bundle, **OPTIONS):
            for _ in range(2):
                model(None).backward()
                model.values = {name: -value for name, value in model.values.items()}
            model.gain.grad = None
            optimizer.step()
        run = dynscope.load(path)
        assert not failures(run)
        at = {name: f"parts.{i}" for i, name in enumerate(model.values)}
        for name in ("half", "brain"):
            x = model.values[name].double().numpy()
            x = np.concatenate([x, -x])
            got = site(run, "activation/variance", at[name])
            assert math.isclose(got, x.var(), rel_tol=1e-5)
        nonfinite = {"one": 2, "all": 4, "first": 1, "last": 1, "infinite": 4, "half": 0}
        for name, count in nonfinite.items():
            assert site(run, "activation/nonfinite_count", at[name]) == 2 * count
            if count:
                assert not math.isfinite(site(run, "activation/variance", at[name]))
        assert math.isnan(site(run, "activation/absmax", at["first"]))
        assert math.isnan(site(run, "activation/absmax", at["last"]))
        assert site(run, "activation/absmax", at["infinite"]) == math.inf


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_nu_06_12_dtypes_of_all_kinds_are_recorded(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.brain, self.wide = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).double()
            self.eight, self.imaginary = nn.Identity(), nn.Linear(4, 4).to(torch.complex64)

        def forward(self, x: Tensor) -> Any:
            y = self.wide(self.brain(x.bfloat16()).double()).float()
            self.eight(y.detach().to(torch.float8_e4m3fn))
            return y + self.imaginary(y.to(torch.complex64)).real

    torch.manual_seed(0)
    model = Mixed()
    run = train(model, tmp_path / "run.h5", [torch.randn(3, 4)] * 2)
    assert {s.path: s.dtype for s in run.sites} == {
        "brain": "bfloat16", "wide": "float64", "eight": "float8_e4m3fn"
    }  # fmt: skip
    assert (run["activation/variance"] > 0).all()
    assert not failures(run)
    weight = model.imaginary.weight
    assert weight.grad is not None
    got = parameter(run, "gradient/norm", "imaginary.weight", 1)
    assert math.isclose(got, float(weight.grad.abs().square().sum().sqrt()), rel_tol=1e-5)
    assert math.isclose(
        parameter(run, "update/norm", "imaginary.weight", 1), got / 100, rel_tol=1e-3
    )
    assert "floating" in reasons(run, "imaginary")


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_nu_08_packed_and_quantised_storage_is_never_read_as_numbers(tmp_path: Path) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            packed = torch.randint(256, (64, 64), dtype=torch.uint8)
            self.packed = nn.Parameter(packed, requires_grad=False)
            self.layer, self.quantised = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: Tensor) -> Any:
            self.quantised(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))
            return self.layer(x)

    run = train(Packed(), tmp_path / "run.h5", [torch.randn(3, 4)])
    assert [s.path for s in run.sites] == ["layer"]
    assert math.isnan(parameter(run, "weight/weibull_k", "packed"))
    assert not failures(run)


class Watched(nn.Module):
    """A layer whose output is made into something else, which a site of its own gives."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer, self.odd, self.make = nn.Linear(4, 4), nn.Identity(), make

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        self.odd(self.make(y))
        return y


UNREADABLE: dict[str, tuple[Any, str]] = {
    "sparse": (lambda y: y.to_sparse(), "sparse"),
    "compressed": (lambda y: y.detach().to_sparse_csr(), "sparse"),
    "meta": (lambda y: y.to("meta"), "meta device"),
    "mkldnn": (lambda y: y.detach().to_mkldnn(), "mkldnn"),
    "packed": (
        lambda y: torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "several numbers",
    ),
    "masked": (lambda y: torch.masked.masked_tensor(y.detach(), y.detach() > 0), "MaskedTensor"),
    "complex": (lambda y: y.to(torch.complex64), "no floating tensor"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_nu_08_outputs_that_hold_no_plain_numbers_are_told_and_never_read(
    tmp_path: Path, kind: str
) -> None:
    make, reason = UNREADABLE[kind]
    run = train(Watched(make), tmp_path / "run.h5", [torch.randn(3, 4)] * 2)
    assert [s.path for s in run.sites] == ["layer"] and not failures(run)
    told = [gap.reason for gap in run.coverage if gap.path == "odd"]
    assert len(told) == 1 and reason in told[0]


class Named(Tensor):
    """A subclass that changes what functions give, but not its numbers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain: Any = super().__torch_function__
        result = plain(func, types, args, kwargs or {})
        return -result if getattr(func, "__name__", "") == "detach" else result


def with_holes(y: Tensor) -> Tensor:
    """Two sequences of lengths 1 and 2, of a buffer of 6 rows."""
    buffer = torch.cat([y.detach()[:1], torch.full((2, 4), 1e6), y.detach()[1:]])
    offsets, lengths = torch.tensor([0, 3, 5]), torch.tensor([1, 2])
    nested: Tensor = torch.nested.nested_tensor_from_jagged(buffer, offsets, lengths)
    return nested


READABLE: dict[str, tuple[Any, float]] = {  # and its sign
    "negated": (lambda y: torch._neg_view(y.detach()), -1),
    "part of a conjugate": (lambda y: torch.complex(y, y).conj().imag, -1),
    "subclass": (lambda y: y.as_subclass(Named), 1),
    "jagged": (
        lambda y: torch.nested.nested_tensor([y[:1].detach(), y[1:].detach()], layout=torch.jagged),
        1,
    ),
    "nested": (lambda y: torch.nested.nested_tensor([y[:1].detach(), y[1:].detach()]), 1),
    "jagged with holes": (with_holes, 1),
    "transposed": (lambda y: y.t(), 1),
    "inference": (lambda y: _in_inference(y), 1),
    "parameter": (lambda y: nn.Parameter(y.detach()), 1),
}


def _in_inference(y: Tensor) -> Tensor:
    with torch.inference_mode():
        return y.clone()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", READABLE)
def test_nu_06_the_numbers_are_those_that_the_output_means(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    make, sign = READABLE[kind]
    model, x = Watched(make), torch.randn(3, 4)
    y = model.layer(x).detach().double()
    run = train(model, tmp_path / "run.h5", [x])
    assert not failures(run)
    assert site(run, "activation/count", "odd") == y.numel()
    assert math.isclose(site(run, "activation/mean", "odd"), sign * y.mean(), rel_tol=1e-5)
    assert math.isclose(site(run, "activation/variance", "odd"), y.var(correction=0), rel_tol=1e-5)


@pytest.mark.parametrize("engine", ["fused", "eager"])
def test_nu_06_tensors_without_memory_are_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    if engine == "eager":
        monkeypatch.setenv("DYNSCOPE_FUSED", "0")
    model = Watched(lambda y: torch._efficientzerotensor((3, 4)))
    run = train(model, tmp_path / "run.h5", [torch.randn(3, 4)])
    assert not failures(run) and site(run, "activation/zero_fraction", "odd") == 1


def test_nu_09_large_tensors_are_no_special_case(tmp_path: Path) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.inner = nn.Parameter(torch.ones(1)), nn.Identity()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x.expand(17_000_000) * self.gain)

    run = train(Large(), tmp_path / "run.h5", [torch.full((1,), 2.0)], loss=lambda y: y[0])
    assert site(run, "activation/count", "inner") == 17_000_000
    assert math.isclose(site(run, "activation/median_abs", "inner"), 2.0, rel_tol=0.02)


def test_nu_11_the_variance_is_that_of_all_elements_without_correction(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    wanted = model(x).detach().double().numpy().var()
    run = train(model, tmp_path / "run.h5", [x])
    assert math.isclose(site(run, "activation/variance", ""), wanted, rel_tol=1e-6)
    assert run["activation/variance"].attrs["definition"]


def test_nu_12_under_autocast_the_dtype_is_stored_and_values_are_close(tmp_path: Path) -> None:
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))

        def call(model: nn.Module, x: Tensor, enabled: bool = enabled) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return model(x)

        run = train(model, tmp_path / f"{enabled}.h5", [torch.randn(64, 8)], call=call)
        assert not failures(run)
        found.append(run)
    assert [run.sites[0].dtype for run in found] == ["float32", "bfloat16"]
    exact, mixed = (run["activation/variance"].values for run in found)
    assert np.allclose(exact, mixed, rtol=0.02)


def weight(module: Any) -> Tensor:
    held: Tensor = module.weight.detach()
    return held


def test_nu_13_default_device_and_dtype_do_not_matter(tmp_path: Path) -> None:
    x, model = torch.randn(3, 4), nn.Sequential()
    torch.set_default_dtype(torch.float64)
    try:
        run = train(nn.Linear(4, 4).float(), tmp_path / "double.h5", [x])
    finally:
        torch.set_default_dtype(torch.float32)
    assert not failures(run) and run.sites[0].dtype == "float32"
    path = tmp_path / "meta.h5"
    with torch.device("meta"):
        model.extend([nn.Linear(4, 4), nn.LazyLinear(4, device="cpu")])
        optimizer = torch.optim.SGD([*model[0].parameters()], lr=0.1)
        scope = dynscope.attach(model, path, optimizer=optimizer, **OPTIONS)
        optimizer.step()
    model[0].to_empty(device="cpu")
    optimizer.param_groups[0]["params"] = [*model[0].parameters()]  # they are other ones now
    for p in model[0].parameters():
        nn.init.normal_(p)
    for step in range(2):
        if step == 1:
            optimizer.add_param_group({"params": [*model[1].parameters()]})
        y = model(x)
        squares(y).backward()
        with torch.device("meta"):
            optimizer.step()
            scope.log(loss=1.0)
    before = weight(model[1]).clone()
    squares(model(x)).backward()
    optimizer.step()
    moved = float((weight(model[1]) - before).double().norm())
    scope.close()
    run = dynscope.load(path)
    assert not failures(run)
    assert run.steps.tolist() == [1, 2, 3, 4]
    assert parameter(run, "gradient/norm", "0.weight", 1) > 0
    assert parameter(run, "update/norm", "0.weight", 1) > 0
    assert site(run, "activation/variance", "1", 2) > 0
    assert math.isclose(parameter(run, "update/norm", "1.weight", 3), moved, rel_tol=1e-4)
