"""A model and its training are left as they were; one test per reported case."""

import copy
import io
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dynscope
from dynscope.hooks.tensor.measure import Measure
from tests.live import failures, parameter, reasons, site, squares, train
from tests.models import Decoder, batches, loss_of

pytestmark = pytest.mark.usefixtures("quick_writer")


class Awkward(nn.Module):
    """Batch norm, in-place code of the parent, a residual added in place, a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.shared, self.drop = nn.Conv2d(4, 4, 1), nn.Dropout(0.3)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = self.activation(self.norm(self.first(x)))
        for _ in range(2):
            y = y + self.drop(self.shared(y).sigmoid_())
            y += 1
        return y.mean((2, 3))


def fingerprint(path: Path | None, **options: Any) -> list[bytes]:
    torch.manual_seed(0)
    model = Awkward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scope = None
    if path is not None:
        scope = dynscope.attach(model, path, optimizer=optimizer, summary=False, **options)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    if scope is not None:
        scope.close()
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.rand(1)]
    return [t.detach().numpy().tobytes() for t in tensors if t is not None]


def test_ni_01_training_is_bit_equal_with_batch_norm_and_in_place_code(tmp_path: Path) -> None:
    plain = fingerprint(None)
    for bundle in ("light", "full"):
        path = tmp_path / f"{bundle}.h5"
        recorded = fingerprint(path, every=3, sites="leaves", metrics=bundle)
        assert recorded == plain
        assert not failures(dynscope.load(path))


def test_ni_03_what_fails_goes_quiet_and_is_told_once_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output, squares_of = Measure.output, Measure.squares_of

    def fail_on_seven(self: Measure, x: Tensor, *rest: Any, **more: Any) -> Any:
        if x.dim() and x.shape[-1] == 7:
            raise ValueError("not this one")
        return output(self, x, *rest, **more)

    def fail_on_a_gradient(self: Measure, x: Tensor) -> Any:
        if x.shape == (7, 4):
            raise ValueError("nor this one")
        return squares_of(self, x)

    monkeypatch.setattr(Measure, "output", fail_on_seven)
    monkeypatch.setattr(Measure, "squares_of", fail_on_a_gradient)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4))
    with caplog.at_level(logging.WARNING, "dynscope"):
        run = train(model, tmp_path / "run.h5", [torch.randn(3, 4)] * 3)
    told = [record.message for record in caplog.records if "no longer recorded" in record.message]
    assert sorted(told) == [
        "dynscope: 0 is no longer recorded: ValueError: not this one",
        "dynscope: 0.weight is no longer recorded: ValueError: nor this one",
    ]
    assert len(failures(run)) == 2
    assert "not this one" in reasons(run, "0") and "nor this one" in reasons(run, "0.weight")
    assert run.steps.tolist() == [1, 2, 3]
    assert (run["activation/variance"].sel(site=run["activation/variance"].path == "1") > 0).all()
    assert parameter(run, "gradient/norm", "0.bias", row=2) > 0
    assert np.isnan(parameter(run, "gradient/norm", "0.weight", row=2))


class Forbidding(torch.Tensor):
    """A tensor that forbids everything but what its own model does with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("linear", "square", "mean", "backward", "float"):
            allow: Any = super().__torch_function__
            return allow(func, types, args, kwargs or {})
        raise TypeError(f"{name} is forbidden")


def test_ni_03_tensors_that_forbid_everything_do_not_stop_the_training(tmp_path: Path) -> None:
    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Any:
            return self.layers(x.as_subclass(Forbidding))

    torch.manual_seed(0)
    model = Wrapping()
    plain = copy.deepcopy(model)
    run = train(model, tmp_path / "run.h5", [torch.ones(3, 4)] * 2, sites="leaves")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        squares(plain(torch.ones(3, 4))).backward()
        optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert parameter(run, "gradient/norm", "layers.0.weight", row=1) > 0


def test_ni_04_recording_some_calls_only_leaves_checkpointing_alone(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layers, x, use_reentrant=False)

    model = Checkpointed()
    path = tmp_path / "run.h5"
    run = train(model, path, [torch.randn(3, 4)] * 4, every=lambda step: step % 2 == 0)
    assert run.steps.tolist() == [2, 4]
    assert (run["activation/n_calls"] == 1).all()
    assert (run["activation_gradient/n_calls"] == 1).all()


def test_ni_06_values_are_those_before_the_next_layer_overwrote_them(tmp_path: Path) -> None:
    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=inplace))
        run = train(model, tmp_path / f"{inplace}.h5", [torch.randn(9, 4)])
        names = ("mean", "variance", "zero_fraction")
        found.append([site(run, f"activation/{name}", path) for name in names for path in "01"])
    assert found[0] == found[1]
    assert found[0][0] < found[0][1]


def test_ni_07_the_fast_path_of_evaluation_is_back_after_closing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    x = torch.randn(2, 3, 8)

    def evaluate() -> tuple[Tensor, bool]:
        with torch.no_grad(), torch.profiler.profile() as profile:
            y = layer.eval()(x)
        layer.train()
        names = {event.key for event in profile.key_averages()}
        return y, "aten::_transformer_encoder_layer_fwd" in names

    plain, fast = evaluate()
    assert fast
    path = tmp_path / "run.h5"
    with dynscope.attach(layer, path, every=1, sites="leaves", summary=False) as scope:
        attached, _ = evaluate()
        scope.step()
    assert torch.allclose(plain, attached, atol=1e-6)
    assert evaluate()[1]
    assert len(dynscope.load(path).sites) == 0


def test_ni_08_11_modules_keep_their_state_and_get_their_hooks_back(tmp_path: Path) -> None:
    model = Decoder(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hooks() -> list[Any]:
        found: list[Any] = [
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
        ]
        for module in model.modules():
            found += [v for k, v in sorted(vars(module).items()) if "hooks" in k]
        for p in model.parameters():
            found += [
                p._backward_hooks or {},
                getattr(p, "_post_accumulate_grad_hooks", None) or {},
            ]
        return [list(each) for each in found]

    def attributes() -> list[Any]:
        state = [(name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()]
        return [*state, *(sorted(vars(m)) for m in model.modules()), len(list(model.buffers()))]

    hooks_before, attributes_before = hooks(), attributes()
    for _ in range(2):
        path = tmp_path / "run.h5"
        scope = dynscope.attach(
            model, path, optimizer=optimizer, every=1, overwrite=True, summary=False
        )
        loss_of(model, batches(1)[0][0]).backward()
        optimizer.step()
        assert attributes() == attributes_before
        Decoder(layers=1).load_state_dict(model.state_dict(), strict=True)
        scope.close()
        scope.close()
        assert hooks() == hooks_before and attributes() == attributes_before
        assert dynscope.load(path).steps.tolist() == [1]


class Holding(nn.Module):
    """A model that keeps its recorder, as a LightningModule might."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scope: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def test_ni_09_models_are_saved_and_copied_while_recorded_and_copies_do_not_record(
    tmp_path: Path,
) -> None:
    model, x = Holding(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.h5"
    model.scope = dynscope.attach(
        model, path, optimizer=optimizer, every=1, sites="leaves", summary=False
    )
    model(x).sum().backward()  # in the middle of a step
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ]
    copy.deepcopy(optimizer)
    for copied in copies:
        assert copied.scope is None
        copied(100 * x).sum().backward()
        assert torch.equal(copied(x), model.layer(x))
    optimizer.step()
    model.scope.close()
    run = dynscope.load(path)
    assert run.steps.tolist() == [1]
    assert site(run, "activation/n_calls", "layer") == 2 + len(copies) - 1


def test_ni_13_two_models_at_once_one_inside_the_other(tmp_path: Path) -> None:
    class Discriminator(nn.Module):
        def __init__(self, generator: nn.Module) -> None:
            super().__init__()
            self.generator, self.score = generator, nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Any:
            return self.score(x)

    g = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4))
    d = Discriminator(g)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (g, d.score)]
    options: dict[str, Any] = {"every": 1, "sites": "leaves", "summary": False}
    with (
        dynscope.attach(g, tmp_path / "g.h5", optimizer=optimizers[0], **options),
        dynscope.attach(d, tmp_path / "d.h5", optimizer=optimizers[1], **options),
    ):
        for _ in range(2):
            d.score.zero_grad()
            fake = g(torch.randn(3, 2))
            (d(fake.detach()) - d(torch.randn(3, 4))).mean().backward()
            optimizers[1].step()
            g.zero_grad()
            d(fake).mean().backward()
            optimizers[0].step()
    run_g, run_d = (dynscope.load(tmp_path / name) for name in ("g.h5", "d.h5"))
    assert [s.path for s in run_g.sites] == ["0", "1", "2"]
    assert run_g.steps.tolist() == run_d.steps.tolist() == [1, 2]
    assert site(run_d, "activation/n_calls", "score") == 2
    assert site(run_g, "activation/n_calls", "0") == 1
    assert parameter(run_d, "gradient/norm", "score.weight") > 0
    assert parameter(run_g, "update/norm", "0.weight") > 0
    # The generator's parameters are none of the discriminator's optimizer: no made-up zero.
    assert np.isnan(parameter(run_d, "update/norm", "generator.0.weight", row=1))
    assert "optimizer" in reasons(run_d, "generator.0.weight")


def test_ni_14_steps_that_are_not_recorded_measure_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("output", "gradient", "input", "size", "squares_of"):
        real = getattr(Measure, name)

        def counted(self: Measure, *args: Any, real: Any = real, name: str = name) -> Any:
            calls.append(name)
            return real(self, *args)

        monkeypatch.setattr(Measure, name, counted)
    model = Decoder(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dynscope.attach(
        model, tmp_path / "run.h5", optimizer=optimizer, every=lambda s: s == 2, summary=False
    ):
        counts = []
        for step in batches(3):
            loss_of(model, step[0]).backward()
            optimizer.step()
            counts.append(len(calls))
    assert counts[0] == 0 and counts[1] > 0 and counts[2] == counts[1]
