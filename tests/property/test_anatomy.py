"""Whatever the tree of modules, anatomy accounts for all of it."""

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dynscope.hooks.model.anatomy import Anatomy
from dynscope.site import ROLES

MAKERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(2, 2),
    lambda: nn.LayerNorm(2),
    lambda: nn.Conv1d(2, 2, 1),
    lambda: nn.Embedding(3, 2),
    lambda: nn.LSTM(2, 2),
    lambda: nn.MultiheadAttention(2, 1),
    lambda: nn.ReLU(),
    lambda: nn.Identity(),
]
LAYERS = st.sampled_from(MAKERS).map(lambda make: make())
NAMES = st.sampled_from(
    [
        "attn",
        "mlp",
        "norm",
        "block1",
        "block2",
        "layers",
        "head",
        "embed",
        "gate",
        "experts",
        "self",
    ]
)


class Composite(nn.Module):
    def __init__(self, parts: dict[str, nn.Module], bare: bool) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        if bare:
            self.scale = nn.Parameter(torch.ones(1))


def composites(children: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    lists = st.lists(children, min_size=1, max_size=4)
    shared = st.tuples(lists, st.integers(0, 3)).map(lambda drawn: drawn[0] + drawn[0][: drawn[1]])
    return st.one_of(
        lists.map(lambda parts: nn.Sequential(*parts)),
        shared.map(nn.ModuleList),
        st.builds(Composite, st.dictionaries(NAMES, children, min_size=1), st.booleans()),
        children.map(nn.DataParallel),
    )


MODELS = st.recursive(LAYERS, composites, max_leaves=12)


@settings(max_examples=80, deadline=None)
@given(MODELS)
def test_every_module_and_parameter_is_accounted_for_once(model: nn.Module) -> None:
    anatomy = Anatomy.of(model)
    assert [id(t) for t in anatomy.tensors.values()] == [
        id(anatomy.tensors[parameter.name]) for parameter in anatomy.parameters
    ]
    assert {id(t) for t in anatomy.tensors.values()} == {id(p) for p in model.parameters()}
    assert len(anatomy.tensors) == len(list(model.parameters()))
    paths = [site.path for site in anatomy.sites]
    assert len(set(paths)) == len(paths)
    called = [
        module
        for module in model.modules()
        if not isinstance(module, nn.ModuleList | nn.DataParallel) and module is not model
    ]
    assert {id(m) for m in called} <= {id(m) for m in anatomy.modules.values()}
    assert {site.role for site in anatomy.sites} <= set(ROLES)
    assert {parameter.role for parameter in anatomy.parameters} <= set(ROLES)


@settings(max_examples=80, deadline=None)
@given(MODELS)
def test_what_anatomy_names_exists(model: nn.Module) -> None:
    anatomy = Anatomy.of(model)
    for path, module in anatomy.residual.items():
        assert path in anatomy.branch and module in anatomy.modules
    assert set(anatomy.branch.values()) <= anatomy.modules.keys()
    for name, layout in anatomy.layouts.items():
        parts = layout.split(anatomy.tensors[name])
        assert sum(part.numel() for _, part in parts) == anatomy.tensors[name].numel()
    if anatomy.sites:
        assert set(anatomy.select("blocks")) <= set(anatomy.sites)
        assert anatomy.select("blocks") and anatomy.select("leaves")
    assert len(anatomy.tree().splitlines()) >= 1


@settings(max_examples=80, deadline=None)
@given(MODELS)
def test_blocks_of_a_stack_are_numbered_without_gaps(model: nn.Module) -> None:
    anatomy = Anatomy.of(model)
    stacks: dict[int, list[int]] = {}
    for site in anatomy.sites:
        if site.role == "block":
            stacks.setdefault(site.stack, []).append(site.depth)
    for found in stacks.values():
        assert found == sorted(set(found))
    assert anatomy.by_call_order == all(site.depth < 0 for site in anatomy.sites)


@settings(max_examples=40, deadline=None)
@given(MODELS)
def test_wrapping_changes_no_name(model: nn.Module) -> None:
    plain = Anatomy.of(model)
    wrapped = Anatomy.of(nn.DataParallel(model))
    assert wrapped.sites == plain.sites and wrapped.parameters == plain.parameters
