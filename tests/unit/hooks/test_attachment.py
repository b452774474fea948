"""What `attach` is given: kept as it was meant, or refused in one line before training starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dynscope
from dynscope.hooks.training.schedule import schedule
from examples import mix_ln
from examples.language_model import Size


def attached(path: Path, model: nn.Module, **options: Any) -> dynscope.Run:
    dynscope.attach(model, path, summary=False, **options).close()
    return dynscope.load(path)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"config": SimpleNamespace(lr=0.1)}, "vars"),
        ({"start_step": -4}, "0 or more"),
        ({"every": 0}, "interval of at least 1"),
        ({"weights_every": 2.5}, "weights_every=2.5"),
        ({"metrics": "heavy"}, "light, standard, full"),
    ],
)
def test_a_bad_argument_is_refused_and_leaves_no_file(
    tmp_path: Path, argument: dict[str, Any], words: str
) -> None:
    with pytest.raises(dynscope.InputError) as refusal:
        attached(tmp_path / "run.h5", nn.Linear(2, 2), **argument)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_an_interval_may_be_a_numpy_integer() -> None:
    interval: Any = np.int64(3)
    due = schedule(interval)
    assert [step for step in range(1, 8) if due(step)] == [1, 3, 6]


def test_numbers_of_numpy_and_torch_stay_numbers_in_the_config(tmp_path: Path) -> None:
    config = {"lr": np.float32(0.5), "layers": np.int64(3), "scale": torch.tensor(2.0)}
    run = attached(tmp_path / "run.h5", nn.Linear(2, 2), config=config, name=7)
    assert run.metadata.config == {"lr": 0.5, "layers": 3, "scale": 2.0}
    assert run.metadata.name == "7"


def test_the_file_tells_the_whole_model_whatever_is_recorded(tmp_path: Path) -> None:
    model = mix_ln.build(Size(width=32, heads=2, hidden=48, blocks=4, context=16))
    run = attached(tmp_path / "run.h5", model, sites="blocks")
    assert run.metadata.anatomy == dynscope.Anatomy.of(model).tree()
    assert "ffn_norm's input" in run.metadata.anatomy
