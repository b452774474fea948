"""Anatomy of the families people train, against what a reader of their code would say.

`UPDATE_GOLDEN=1 pytest tests/unit/hooks/model/test_anatomy_families.py` writes tests/unit/hooks/model/anatomy/*.txt anew;
read the difference before keeping it.
"""

import os
import re
from pathlib import Path

import pytest

from dynscope.hooks.model.anatomy import Anatomy
from tests.unit.model_families import MORE, NAMES, build
from tests.unit.streams import unexplained

GOLDEN = Path(__file__).parent / "anatomy"

# What a reader of a page does not look for: containers around the blocks, rotations, shortcuts.
EXPECTED_OTHER = {
    "around": r"model|transformer|gpt_neox|backbone|bert|roberta|vit|resnet|(text|vision)_model"
    r"|(.*\.)?(encoder|decoder)",
    "positions": r".*\.(rotary_emb|relative_attention_bias)",
    "BERT's insides": r".*\.(attention\.self|attention\.output|intermediate)",
    "T5's sums": r".*block\.\d\.layer\.\d",
    "Mamba's selection": r".*mixer\.(x_proj|dt_proj)",
    "ResNet's insides": r"resnet\.encoder\.stages\.\d.*|classifier\.0",
}


def said(anatomy: Anatomy) -> str:
    """The tree, and the role and layout of each parameter, of equal blocks once."""
    lines = {}
    for parameter in anatomy.parameters:
        name = re.sub(r"\.\d+\.", ".#.", parameter.name)
        layout = anatomy.layouts.get(parameter.name)
        split = f" {layout}" if layout else ""
        lines[name] = f"{name}: {parameter.role}{split}"
    return anatomy.tree() + "\n\n" + "\n".join(lines.values()) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_every_module_and_parameter_of_a_family_has_the_role_written_down(name: str) -> None:
    model, _ = build(name)
    text, path = said(Anatomy.of(model)), GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_two_blocks_in_each_stack(name: str) -> None:
    anatomy = Anatomy.of(build(name)[0])
    blocks = [(s.stack, s.depth) for s in anatomy.sites if s.role == "block"]
    two_stacks = name in ("t5", "t5_gated", "bart", "whisper", "clip")
    assert blocks == [
        (stack, depth)
        for stack in range(1 + two_stacks)
        for depth in range(4 if name == "resnet" else 2)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_called_other_is_nothing_a_reader_looks_for(name: str) -> None:
    anatomy = Anatomy.of(build(name)[0])
    other = [site.path for site in anatomy.sites if site.role == "other"]
    known = "|".join(EXPECTED_OTHER.values())
    assert [path for path in other if not re.fullmatch(known, path)] == []
    unknown = [p.name for p in anatomy.parameters if p.role == "other"]
    assert unknown == (["logit_scale"] if name == "clip" else [])


@pytest.mark.parametrize("name", [*(name for name in NAMES if name != "resnet"), *MORE])
def test_each_sublayer_of_a_family_is_added_where_anatomy_says(name: str) -> None:
    model, inputs = build(name)
    anatomy = Anatomy.of(model)
    assert anatomy.branch.keys() == anatomy.residual.keys() != set()
    assert unexplained(model, anatomy, inputs) == []
