"""Two trained networks: what is recorded equals what bare hooks see, on the same step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynscope
from dynscope import reports
from examples import finetune_minilm, inspect_smollm2
from examples.packaged import MINILM, SMOLLM2

pytestmark = pytest.mark.slow

CLOSE = 1e-4


@dataclass
class Seen:
    """The output of every module, and every parameter's gradient, of one step without dynscope."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    output_gradients: dict[str, Tensor] = field(default_factory=dict)

    def hook(self, path: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: object, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.requires_grad:
                self.outputs[path] = first.detach().clone()
                first.register_hook(lambda g: self.output_gradients.__setitem__(path, g.clone()))

        return keep


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def seen(model: nn.Module, loss: Callable[[], Tensor]) -> Seen:
    found = Seen()
    handles = [m.register_forward_hook(found.hook(path)) for path, m in model.named_modules()]
    loss().backward()
    for handle in handles:
        handle.remove()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found.gradients[name] = parameter.grad.clone()
    model.zero_grad()
    return found


def recorded(model: nn.Module, loss: Callable[[], Tensor], path: Path) -> dynscope.Run:
    """One step that is recorded and changes nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dynscope.attach(model, path, optimizer=optimizer, every=1, summary=False) as scope:
        value = loss()
        value.backward()
        optimizer.step()
        scope.log(loss=value)
    model.zero_grad()
    return dynscope.load(path)


@dataclass(frozen=True)
class Both:
    twin: Seen
    run: dynscope.Run

    def row(self, metric: str) -> dict[str, Any]:
        """The metric of the only step, by site."""
        values = self.run[metric][0]
        return dict(zip(values["path"].values, values.values, strict=True))


def minilm() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, tokenizer = finetune_minilm.load()
    pairs = finetune_minilm.read_pairs()[0][:8]
    return model, lambda: finetune_minilm.loss_of(model, tokenizer, pairs)


def smollm2() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, tokenizer = inspect_smollm2.load()
    tokens = inspect_smollm2.batches(tokenizer, 1)[0, :, :48]
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


MODELS = {"minilm": (MINILM, minilm, 6), "smollm2": (SMOLLM2, smollm2, 30)}


@pytest.fixture(scope="module", params=MODELS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    package, make, blocks = MODELS[request.param]
    for needed in (package, "transformers", "accelerate", "gguf"):
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    torch.manual_seed(0)
    model, loss = make()
    without_dropout(model)
    twin = seen(model, loss)
    run = recorded(model, loss, tmp_path_factory.mktemp("real") / f"{request.param}.h5")
    assert sum(site.role == "block" for site in run.sites) == blocks
    assert len(run.sites) == 3 * blocks + 1
    yield Both(twin, run)


@pytest.mark.parametrize(
    ("metric", "of"),
    [
        ("activation/mean", lambda x: x.mean()),
        ("activation/variance", lambda x: x.var(correction=0)),
        ("activation/rms", lambda x: x.square().mean().sqrt()),
        ("activation/absmax", lambda x: x.abs().max()),
        ("activation/mean_abs", lambda x: x.abs().mean()),
    ],
)
def test_activations_are_those_of_bare_hooks(
    both: Both, metric: str, of: Callable[[Tensor], Tensor]
) -> None:
    for path, value in both.row(metric).items():
        output = both.twin.outputs[path].double()
        size = float(output.square().mean().sqrt()) if metric == "activation/mean" else 0.0
        assert value == pytest.approx(float(of(output)), rel=CLOSE, abs=CLOSE * size), path


def test_the_median_is_within_a_hundredth(both: Both) -> None:
    for path, value in both.row("activation/median_abs").items():
        median = np.median(both.twin.outputs[path].abs().numpy())
        assert value == pytest.approx(median, rel=0.01), path


def test_the_three_largest_are_where_bare_hooks_see_them(both: Both) -> None:
    places = [both.row(f"massive/{name}") for name in ("batch", "token", "channel")]
    for path, values in both.row("massive/value").items():
        output = both.twin.outputs[path]
        largest = output.abs().flatten().topk(3).values
        assert np.abs(values) == pytest.approx(largest.numpy(), rel=CLOSE), path
        for rank in range(3):
            batch, token, channel = (int(place[path][rank]) for place in places)
            there = float(output[batch, token, channel])
            assert values[rank] == pytest.approx(there, rel=CLOSE), (path, rank)


def test_activation_gradients_are_those_of_bare_hooks(both: Both) -> None:
    for path, value in both.row("activation_gradient/norm").items():
        gradient = both.twin.output_gradients[path].double()
        assert value == pytest.approx(float(gradient.norm()), rel=CLOSE), path


def test_gradient_norms_are_those_of_autograd(both: Both) -> None:
    norms = both.run["gradient/norm"][0]
    for name, value in zip(norms["name"].values, norms.values, strict=True):
        gradient = both.twin.gradients[name].double()
        assert value == pytest.approx(float(gradient.norm()), rel=CLOSE), name


def test_angular_distance_and_branch_ratio_follow_from_the_stream(both: Both) -> None:
    """Of a Pre-LN attention: what it adds over the block's input, which is the block before."""
    angle, ratio = both.row("activation/angular_distance"), both.row("activation/branch_ratio")
    sites = {(site.role, site.depth): site.path for site in both.run.sites}
    for depth in range(1, 6):
        before = both.twin.outputs[sites["block", depth - 1]].double()
        block = sites["block", depth]
        cosine = torch.cosine_similarity(before, both.twin.outputs[block].double(), dim=-1)
        turn = (cosine.clamp(-1, 1).arccos() / torch.pi).mean()
        assert angle[block] == pytest.approx(float(turn), rel=1e-3)
        attention = sites["attention", depth]
        if "layers" in attention:  # in BERT its output has been added and normalized already
            added = both.twin.outputs[attention].double()
            twin = float(added.square().mean().sqrt() / before.square().mean().sqrt())
            assert ratio[attention] == pytest.approx(twin, rel=CLOSE)


def test_the_page_of_a_real_model_can_be_drawn(both: Both) -> None:
    assert len(reports.report(both.run).html) < 12e6


def test_the_example_fine_tunes_on_its_own_sentences(tmp_path: Path) -> None:
    train, held_out = finetune_minilm.read_pairs()
    assert (len(train), len(held_out)) == (80, 20)
    assert len({sentence for pair in train + held_out for sentence in pair}) == 200
    if find_spec(MINILM) is None:
        pytest.skip(f"{MINILM} is not installed")
    finetune_minilm.train(tmp_path / "run.h5", steps=2)
    run = dynscope.load(tmp_path / "run.h5")
    assert run.metadata.closed and run.steps.tolist() == [1, 2]
    assert run.scalars("held_out_loss")["step"].values.tolist() == [1]


def test_smollm2_has_its_massive_activation_from_block_11_on(both: Both) -> None:
    if len(both.run.sites) != 91:
        pytest.skip("SmolLM2's")
    values, channels, tokens = (
        both.run[f"massive/{name}"][0].sel(top=0) for name in ("value", "channel", "token")
    )
    block = values["role"].values == "block"
    depth = values["depth"].values[block]
    massive = depth[np.abs(values.values[block]) > 1e4]
    assert massive.tolist() == list(range(11, 28))
    inside = block & (values["depth"].values >= 11) & (values["depth"].values < 28)
    assert set(channels.values[inside]) == {507} and set(tokens.values[inside]) == {0}


def test_smollm2s_weights_lie_where_its_training_left_them(both: Both) -> None:
    """FFN near the half-normal, query and key below; the 4 bits they are kept in change little."""
    if len(both.run.sites) != 91:
        pytest.skip("SmolLM2's")
    k, r2 = both.run["weight/weibull_k"][0], both.run["weight/weibull_r2"][0]
    matrix = np.isfinite(k.values)
    median = {
        role: float(np.median(k.values[matrix & (k["role"].values == role)]))
        for role in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert all(1.18 < median[role] < 1.204 for role in ("gate", "up", "down")), median
    assert all(1.05 < median[role] < 1.18 for role in ("q", "k", "v", "o")), median
    assert median["q"] == min(median.values())
    assert np.nanmin(r2) > 0.997
