"""Module trees as real use brings them; one test per reported case."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import weight_norm

from dynscope.hooks.model.anatomy import Anatomy
from examples import pre_ln
from examples.language_model import Size

SMALL = Size(vocabulary=11, width=8, heads=2, hidden=12, blocks=3, context=8)


class PeftModel(nn.Module):
    """The shape of PEFT's wrappers and adapted layers, by the names of their classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = BaseTuner(model)


class BaseTuner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class BaseTunerLayer(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})


class LightningModule(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()


class Nested(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model


def compiled(model: nn.Module) -> nn.Module:
    wrapped = torch.compile(model, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "peft": PeftModel,
    "lightning": LightningModule,
    "all": lambda model: compiled(nn.DataParallel(checkpoint_wrapper(model))),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_co_04_di_08_a_wrapped_model_has_the_names_of_the_plain_one(wrapper: str) -> None:
    model = pre_ln.build(SMALL)
    plain, wrapped = Anatomy.of(model), Anatomy.of(WRAPPERS[wrapper](model))
    sites = [site for site in wrapped.sites if site.path != "loss"]
    assert tuple(sites) == plain.sites
    assert wrapped.parameters == plain.parameters
    assert wrapped.modules["blocks.0.ffn"] is model.get_submodule("blocks.0.ffn")
    assert wrapped.residual == plain.residual


def test_co_04_a_wrapper_inside_a_model_leaves_no_trace() -> None:
    model = pre_ln.build(SMALL)
    plain = Anatomy.of(Nested(model))
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(compiled(block))
    assert Anatomy.of(Nested(model)).sites == plain.sites


def test_wb_14_an_adapted_layer_keeps_its_name_and_its_adapters_are_layers_of_their_own() -> None:
    model = pre_ln.build(SMALL)
    names = [parameter.name for parameter in Anatomy.of(model).parameters]
    for block in model.blocks:
        attention = block.get_submodule("attention")
        attention.q = BaseTunerLayer(attention.get_submodule("q"))  # type: ignore[arg-type]
    anatomy = Anatomy.of(PeftModel(model))
    found = {parameter.name: parameter for parameter in anatomy.parameters}
    assert set(names) <= set(found)
    adapted = found["blocks.0.attention.q.weight"]
    assert (adapted.role, adapted.trainable) == ("q", False)
    assert found["blocks.0.attention.q.lora_A.default.weight"].role == "adapter"
    roles = {site.path: site.role for site in anatomy.sites}
    assert roles["blocks.0.attention.q"] == "q"
    assert roles["blocks.0.attention.q.lora_B.default"] == "adapter"
    assert "blocks.0.attention.q.base_layer" not in roles
    leaves = {site.path for site in anatomy.select("leaves")}
    assert {"blocks.0.attention.q", "blocks.0.attention.q.lora_A.default"} <= leaves


def test_hk_11_weights_used_by_the_parent_are_not_lost() -> None:
    anatomy = Anatomy.of(nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=True)}))
    assert {parameter.name: parameter.role for parameter in anatomy.parameters} == {
        "attn.in_proj_weight": "qkv",
        "attn.in_proj_bias": "qkv",
        "attn.out_proj.weight": "o",
        "attn.out_proj.bias": "o",
    }
    assert {"attn", "attn.out_proj"} <= {site.path for site in anatomy.select("leaves")}


def test_hk_13_bare_parameters_are_listed_and_containers_are_no_sites() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
            self.q = nn.Parameter(torch.ones(4))
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

    anatomy = Anatomy.of(Root())
    assert {p.name for p in anatomy.parameters} == {
        "q", "p.0", "p.1", "layers.0.weight", "layers.0.bias",
    }  # fmt: skip
    assert [site.path for site in anatomy.sites] == ["layers.0"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_hk_14_a_scripted_part_is_named_with_its_parameters() -> None:
    anatomy = Anatomy.of(nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2)))
    assert [(site.type, site.role) for site in anatomy.sites] == [
        ("Linear", "ffn"),
        ("Linear", "head"),
    ]
    assert [p.name for p in anatomy.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_cc_04_a_module_under_two_names_is_one_site_with_an_alias() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    anatomy = Anatomy.of(nn.ModuleList([layer, layer]))
    assert {site.path: site.aliases for site in anatomy.sites} == {
        "0": ("1",),
        "0.0": ("1.0",),
        "0.1": ("1.1",),
    }
    assert [p.name for p in anatomy.parameters] == ["0.0.weight", "0.0.bias"]


def test_cc_05_a_tied_weight_is_one_parameter_and_both_modules_are_sites() -> None:
    model = pre_ln.build(SMALL)
    model.head.weight = model.embed.weight
    anatomy = Anatomy.of(model)
    roles = {parameter.name: parameter.role for parameter in anatomy.parameters}
    assert roles["embed.weight"] == "embed" and "head.weight" not in roles
    assert anatomy.tied == {"embed.weight": ("head.weight",)}
    assert {"embed", "head"} <= {site.path for site in anatomy.sites}
    assert sum(p.numel for p in anatomy.parameters) == sum(p.numel() for p in model.parameters())


def test_a_module_that_holds_its_parent_is_no_endless_tree() -> None:
    model = pre_ln.build(SMALL)
    plain = Anatomy.of(model)
    model.blocks[0].add_module("owner", model)
    assert [site.path for site in Anatomy.of(model).sites] == [site.path for site in plain.sites]


def test_a_parametrized_weight_belongs_to_its_layer() -> None:
    model = pre_ln.build(SMALL)
    weight_norm(model.blocks[0].get_submodule("ffn.up"))
    anatomy = Anatomy.of(model)
    roles = {parameter.name: parameter.role for parameter in anatomy.parameters}
    assert roles["blocks.0.ffn.up.parametrizations.weight.original1"] == "up"
    types = {site.path: site.type for site in anatomy.sites}
    assert types["blocks.0.ffn.up"] == "Linear"
    assert not any("parametrizations" in path for path in types)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_wb_16_parameters_without_storage_are_listed() -> None:
    with torch.device("meta"):
        meta = Anatomy.of(pre_ln.build(SMALL))
    assert meta.parameters == Anatomy.of(pre_ln.build(SMALL)).parameters
    lazy = Anatomy.of(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)))
    assert {(p.shape, p.numel) for p in lazy.parameters} == {((), 0)}
    assert [site.role for site in lazy.sites] == ["ffn", "activation", "head"]
