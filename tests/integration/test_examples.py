"""The examples are the architectures they say they are, and the demo ends with a page."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dynscope
from dynscope import reports
from examples import face_attributes, mix_ln, norm_tuning, nucleotide_bert, pre_ln
from examples.compare import record, write_page
from examples.demo import claims
from examples.language_model import Attention, Size
from examples.studies import page, runs
from examples.studies.__main__ import results
from examples.studies.study import DIRECTION, FAILS, HOLDS
from examples.text import Text
from examples.train import Recipe

ROOT = Path(__file__).parents[2]
SIZE = Size(width=32, heads=2, hidden=48, blocks=8, context=16)


def test_both_architectures_start_from_the_same_weights() -> None:
    states = []
    for build in (pre_ln.build, mix_ln.build):
        torch.manual_seed(0)
        states.append(build(SIZE).state_dict())
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name


def test_rotary_attention_sees_relative_positions_and_never_the_future() -> None:
    torch.manual_seed(0)
    attention = Attention(SIZE)
    q = attention.rotate(torch.ones(SIZE.context, SIZE.width // SIZE.heads))
    torch.testing.assert_close(q[3] @ q[1], q[9] @ q[7])
    x = torch.randn(1, SIZE.context, SIZE.width)
    changed = x.clone()
    changed[:, 9:] += 1
    torch.testing.assert_close(attention(x)[:, :9], attention(changed)[:, :9])


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    recipe = Recipe(steps=100)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == 1
    assert rates[-1] == pytest.approx(0.1, abs=0.001)


def test_a_text_too_short_to_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(Exception, match="too short: 9 bytes"):
        Text.read(tmp_path / "short.txt")


def test_the_demo_records_two_runs_and_reads_its_claims_from_them(tmp_path: Path) -> None:
    recipe = Recipe(steps=6, batch=2, every=2, validate_every=3)
    for _ in range(2):  # a folder that was used before is no obstacle
        pre, mix = map(
            dynscope.load, record(["pre_ln", "mix_ln"], tmp_path, Text.read(), recipe, SIZE)
        )
    assert list(pre.steps) == list(mix.steps)
    assert {"loss", "validation_loss"} <= set(pre.scalar_names)
    assert mix.metadata.config["architecture"] == "mix_ln"
    assert ["8" in claim.text for claim in claims(pre, mix)] == [True, False, True]


def test_compare_trains_every_architecture_from_every_seed(tmp_path: Path) -> None:
    recipe = Recipe(steps=3, batch=2, every=1)
    paths = record(["pre_ln", "keel"], tmp_path, Text.read(), recipe, SIZE, seeds=[0, 1])
    assert [path.stem for path in paths] == [
        "pre_ln-seed0",
        "pre_ln-seed1",
        "keel-seed0",
        "keel-seed1",
    ]
    write_page(paths, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(path.stem in page for path in paths)


@pytest.mark.parametrize("script", ["examples/train.py", "examples/compare.py"])
def test_scripts_run_as_files_too(script: str) -> None:
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0 and "--depth" in done.stdout


def test_a_cascade_of_two_networks_is_recorded_in_three_phases(tmp_path: Path) -> None:
    face_attributes.train(tmp_path / "faces.h5", steps=12)
    run = dynscope.load(tmp_path / "faces.h5")
    assert [event.kind for event in run.events].count("phase") == 3
    gradients = run["gradient/norm"]
    of_anet = gradients.sel(parameter=[n.startswith("anet") for n in gradients["name"].values])
    assert bool(of_anet.sel(step=1).isnull().all()) and bool(of_anet.sel(step=10).notnull().all())
    depths = {site.path: site.depth for site in run.sites}
    assert depths["lnet.response"] < depths["anet.local.0.cells.0"] < depths["anet.fc"]
    assert reports.report(run).html


@pytest.mark.parametrize("lora", [False, True])
def test_padding_of_the_nucleotide_model_is_left_out_and_adapters_are_told_apart(
    tmp_path: Path, lora: bool
) -> None:
    nucleotide_bert.train(tmp_path / "run.h5", steps=3, lora=lora)
    run = dynscope.load(tmp_path / "run.h5")
    blocks = run["activation/count"].sel(site=run["activation/count"]["role"] == "block")
    tokens = np.diff(run["clock/tokens"].values, prepend=0)
    assert blocks.values[0, 0] == tokens[0] * 64  # the width: no padded position is in it
    adapters = [p for p in run.parameters if p.role == "adapter"]
    assert len(adapters) == (16 if lora else 0)
    frozen = [p for p in run.parameters if not p.trainable]
    assert bool(frozen) == lora
    assert reports.report(run).html


def test_only_norms_learn_in_norm_tuning(tmp_path: Path) -> None:
    norm_tuning.train(tmp_path / "run.h5", steps=3)
    run = dynscope.load(tmp_path / "run.h5")
    gradients = run["gradient/norm"]
    moved = {p.name for p, g in zip(run.parameters, gradients.values[-1], strict=False) if g > 0}
    assert moved and all("norm" in name for name in moved)
    assert reports.report(run).html


def test_the_page_of_reproduced_claims_is_made_of_the_results_that_are_kept(tmp_path: Path) -> None:
    page.write(results(), tmp_path)
    told = (ROOT / "docs" / "reproduction.md").read_text()
    assert (tmp_path / "reproduction.md").read_text() == told, "run python -m examples.studies"
    for kept in results():
        assert kept["seeds"] and kept["torch"] and kept["command"].endswith(kept["study"])
        assert all(f["verdict"] in (HOLDS, DIRECTION, FAILS) for f in kept["findings"])


def test_a_run_that_is_there_is_not_trained_again(tmp_path: Path) -> None:
    recipe = Recipe(steps=2, batch=2, every=1)
    first = runs.run("pre_ln", 0, size=SIZE, recipe=recipe, folder=tmp_path)
    changed = first.path.stat().st_mtime_ns
    runs.run("pre_ln", 0, size=SIZE, recipe=recipe, folder=tmp_path)
    assert first.path.stat().st_mtime_ns == changed
    longer = runs.run("pre_ln", 0, size=SIZE, recipe=Recipe(steps=3, batch=2), folder=tmp_path)
    assert longer.path.stat().st_mtime_ns > changed
