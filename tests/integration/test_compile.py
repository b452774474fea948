"""Under torch.compile: no graph break, one more graph than the plain model, every row once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import dynscope
from examples import mix_ln
from examples.language_model import Size
from tests.models import Decoder, Wrap, batches, directly, loss_of, nonreentrant

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def third(step: int) -> bool:
    return step % 3 == 1


def compiled(model: nn.Module, backend: str, per_block: bool) -> nn.Module:
    if not per_block:
        whole: Any = torch.compile(model, fullgraph=True, backend=backend)
        return whole  # type: ignore[no-any-return]
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(fullgraph=True, backend=backend)
    return model


def train(
    path: Path | None,
    backend: str,
    *,
    per_block: bool = False,
    wrap: Wrap = directly,
    micro: int = 1,
) -> tuple[int, list[float], torch.Tensor]:
    """Graphs made, losses, and all weights after 12 steps, of which every third is recorded."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Decoder(layers=4, dropout=0.0, wrap=wrap)
    running = compiled(model, backend, per_block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = None
    if path is not None:
        scope = dynscope.attach(running, path, optimizer=optimizer, every=third, summary=False)
    losses = []
    for step in batches(12, micro):
        optimizer.zero_grad()
        parts = [loss_of(running, tokens) for tokens in step]
        for part in parts:
            part.backward()
        optimizer.step()
        losses.append(float(parts[-1]))
    if scope:
        scope.close()
    assert not counters["graph_break"]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return counters["stats"]["unique_graphs"], losses, weights


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("wrap", [directly, nonreentrant])
def test_the_whole_model_compiles_without_a_break(tmp_path: Path, backend: str, wrap: Wrap) -> None:
    plain, losses, weights = train(None, backend, wrap=wrap)
    graphs, recorded_losses, recorded = train(tmp_path / "run.h5", backend, wrap=wrap)
    assert graphs == plain + 1
    assert np.allclose(losses, recorded_losses, rtol=1e-5)
    assert torch.allclose(weights, recorded, rtol=1e-4, atol=1e-6)
    run = dynscope.load(tmp_path / "run.h5")
    assert run.steps.tolist() == [1, 4, 7, 10]
    assert (run["activation/n_calls"] == 1).all()
    assert (run["activation_gradient/n_calls"] == 1).all()


def test_the_demos_model_compiles_without_a_break(tmp_path: Path) -> None:
    graphs = []
    for recorded in (False, True):
        torch.compiler.reset()
        counters.clear()
        model = mix_ln.build(Size(width=32, heads=2, hidden=48, blocks=4, context=16))
        running = compiled(model, "aot_eager", per_block=False)
        optimizer = torch.optim.Adam(model.parameters())
        scope = None
        if recorded:
            scope = dynscope.attach(
                running, tmp_path / "run.h5", optimizer=optimizer, every=third, summary=False
            )
        for _ in range(6):
            optimizer.zero_grad()
            running(torch.randint(256, (2, 16))).square().mean().backward()
            optimizer.step()
        if scope:
            scope.close()
        assert not counters["graph_break"]
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[0] + 1
    run = dynscope.load(tmp_path / "run.h5")
    assert run.steps.tolist() == [1, 4]
    assert (run["activation/n_calls"] == 1).all()


def test_compiled_values_equal_eager_ones(tmp_path: Path) -> None:
    train(tmp_path / "compiled.h5", "aot_eager", micro=2)
    model = Decoder(layers=4, dropout=0.0)
    torch.manual_seed(0)
    model = Decoder(layers=4, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "eager.h5"
    with dynscope.attach(model, path, optimizer=optimizer, every=third, summary=False):
        for step in batches(12, 2):
            optimizer.zero_grad()
            for part in [loss_of(model, tokens) for tokens in step]:
                part.backward()
            optimizer.step()
    eager, graph = dynscope.load(path), dynscope.load(tmp_path / "compiled.h5")
    assert [site.path for site in eager.sites] == [site.path for site in graph.sites]
    for metric in eager.metrics:
        if metric.axes[0] == "step" and metric.group != "massive":
            assert np.allclose(
                eager[metric.name], graph[metric.name], rtol=1e-4, atol=1e-6, equal_nan=True
            ), metric.name


def test_blocks_compiled_one_by_one_need_two_graphs_more(tmp_path: Path) -> None:
    # torch runs a compiled module's own hooks outside its graph: they make the second one.
    plain, losses, _ = train(None, "aot_eager", per_block=True)
    graphs, recorded, _ = train(tmp_path / "run.h5", "aot_eager", per_block=True)
    assert graphs <= plain + 2
    assert np.allclose(losses, recorded, rtol=1e-5)
    run = dynscope.load(tmp_path / "run.h5")
    assert run.steps.tolist() == [1, 4, 7, 10]
    assert (run["activation/n_calls"] == 1).all()


def test_attaching_after_the_first_compiled_call_still_records(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = Decoder(layers=2, dropout=0.0)
    running: Any = torch.compile(model, backend="aot_eager")
    loss_of(running, batches(1)[0][0]).backward()
    with dynscope.attach(running, tmp_path / "run.h5", every=1, summary=False) as scope:
        loss_of(running, batches(1)[0][0]).backward()
        scope.step()
    run = dynscope.load(tmp_path / "run.h5")
    assert (run["activation/n_calls"] == 1).all()
    assert len(run.sites) == 7
    assert any(event.kind == "compile" for event in run.events)


def test_names_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model = Decoder(layers=2)
    running: Any = torch.compile(model, backend="aot_eager")
    with dynscope.attach(running, tmp_path / "run.h5", summary=False) as scope:
        assert not any("_orig_mod" in site.path for site in scope.anatomy.sites)
        assert [p.name for p in scope.anatomy.parameters] == [
            n for n, _ in model.named_parameters()
        ]


def blocks_of(model: Decoder, how: str) -> None:
    """Compile every block by itself: in place, or put in a compiled wrapper."""
    for i, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(fullgraph=True, backend="aot_eager")
        else:
            wrapped: Any = torch.compile(block, fullgraph=True, backend="aot_eager")
            model.blocks[i] = wrapped


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_the_number_of_blocks_does_not_matter_for_the_number_of_graphs(
    tmp_path: Path, how: str
) -> None:
    """One graph for unarmed steps, one for the first block, whose input comes from the embedding."""
    graphs = []
    for recorded in (False, True):
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Decoder(layers=24, dropout=0.0)
        blocks_of(model, how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scope = recorded and dynscope.attach(
            model, tmp_path / "run.h5", optimizer=optimizer, every=third, summary=False
        )
        for step in batches(6):
            optimizer.zero_grad()
            loss_of(model, step[0]).backward()
            optimizer.step()
        if scope:
            scope.close()
        assert not counters["graph_break"]
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] <= graphs[0] + 2
    run = dynscope.load(tmp_path / "run.h5")
    assert (run["activation/n_calls"] == 1).all() and len(run.steps) == 2
    assert not any("_orig_mod" in site.path for site in run.sites)


def test_sequences_of_changing_length_make_no_graph_more_than_without_us(tmp_path: Path) -> None:
    graphs = []
    for recorded in (False, True):
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Decoder(layers=2, dropout=0.0)
        running: Any = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scope = recorded and dynscope.attach(
            running, tmp_path / "run.h5", optimizer=optimizer, every=third, summary=False
        )
        for length in (8, 6, 7, 5, 8, 6):
            optimizer.zero_grad()
            loss_of(running, batches(1)[0][0][:, :length]).backward()
            optimizer.step()
        if scope:
            scope.close()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] <= graphs[0] + 1
    run = dynscope.load(tmp_path / "run.h5")
    blocks = [i for i, site in enumerate(run.sites) if site.role == "block"]
    counts = run["activation/count"].values[:, blocks[0]]
    assert counts[0] / counts[1] == pytest.approx(7 / 4)  # targets are shifted


@pytest.mark.parametrize("before", [True, False], ids=["attached first", "compiled first"])
def test_bfloat16_values_are_within_a_hundredth_of_eager_ones(tmp_path: Path, before: bool) -> None:
    runs = []
    for compile_it in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Decoder(layers=2, dropout=0.0)
        running: Any = model
        if compile_it and not before:
            running = torch.compile(model, fullgraph=True, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        path = tmp_path / f"{compile_it}.h5"
        with dynscope.attach(running, path, optimizer=optimizer, every=1, summary=False):
            if compile_it and before:
                running = torch.compile(model, fullgraph=True, backend="aot_eager")
            for step in batches(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(running, step[0])
                loss.backward()
                optimizer.step()
        runs.append(dynscope.load(path))
    eager, graph = runs
    assert [site.path for site in eager.sites] == [site.path for site in graph.sites]
    for name in (
        "activation/variance",
        "activation/rms",
        "activation_gradient/rms",
        "gradient/norm",
    ):
        np.testing.assert_allclose(eager[name], graph[name], rtol=1e-2, err_msg=name)


def test_a_compiled_training_step_records_and_an_evaluation_does_not(tmp_path: Path) -> None:
    torch.compiler.reset()
    counters.clear()
    model = Decoder(layers=2, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(model, tokens)

    path = tmp_path / "run.h5"
    with dynscope.attach(model, path, optimizer=optimizer, every=1, summary=False) as scope:
        for step in batches(3):
            with torch.no_grad():
                loss(step[0])
            optimizer.zero_grad()
            loss(step[0]).backward()
            optimizer.step()
    assert not counters["graph_break"] and scope.steps == 3
    run = dynscope.load(path)
    assert (run["activation/n_calls"] == 1).all()
    assert np.isfinite(run["activation_gradient/rms"]).all()
