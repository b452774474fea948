"""Anatomy finds depth and roles by itself, in models of every shape."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dynscope.errors import InputError
from dynscope.hooks.model.anatomy import Anatomy
from dynscope.site import ROLES
from examples import mix_ln, pre_ln
from examples.language_model import Size
from tests.unit.streams import unexplained

SMALL = Size(vocabulary=11, width=8, heads=2, hidden=12, blocks=4, context=8)
TOKENS = torch.arange(6)[None]


def roles(anatomy: Anatomy) -> dict[str, str]:
    return {site.path: site.role for site in anatomy.sites}


def depths(anatomy: Anatomy, role: str = "block") -> dict[str, int]:
    return {site.path: site.depth for site in anatomy.sites if site.role == role}


class TestLanguageModel:
    """The examples' own: a LLaMA-like decoder."""

    def test_every_module_has_its_role(self) -> None:
        found = roles(Anatomy.of(pre_ln.build(SMALL)))
        block = {
            "": "block", ".attention_norm": "norm", ".attention": "attention", ".attention.q": "q",
            ".attention.k": "k", ".attention.v": "v", ".attention.o": "o", ".ffn_norm": "norm",
            ".ffn": "ffn", ".ffn.gate": "gate", ".ffn.up": "up", ".ffn.down": "down",
        }  # fmt: skip
        expected = {f"blocks.{i}{path}": role for i in range(4) for path, role in block.items()}
        assert found == {"embed": "embed", **expected, "norm": "norm", "head": "head"}

    def test_blocks_are_the_depth_axis(self) -> None:
        anatomy = Anatomy.of(mix_ln.build(SMALL))
        assert depths(anatomy) == {f"blocks.{i}": i for i in range(4)}
        assert not anatomy.by_call_order

    def test_blocks_are_selected_with_their_sublayers_and_without_the_head(self) -> None:
        selected = [site.path for site in Anatomy.of(pre_ln.build(SMALL)).select("blocks")]
        assert selected[:4] == ["embed", "blocks.0", "blocks.0.attention", "blocks.0.ffn"]
        assert len(selected) == 1 + 4 * 3

    def test_leaves_are_the_layers(self) -> None:
        selected = Anatomy.of(pre_ln.build(SMALL)).select("leaves")
        assert len(selected) == 1 + 4 * 9 + 2
        assert {site.type for site in selected} == {"Embedding", "Linear", "RMSNorm"}

    def test_pre_ln_and_post_ln_are_told_apart_block_by_block(self) -> None:
        anatomy = Anatomy.of(mix_ln.build(SMALL))
        assert anatomy.residual["blocks.0.attention"] == "blocks.0"
        assert anatomy.residual["blocks.0.ffn"] == "blocks.0.ffn"
        assert anatomy.residual["blocks.1.attention"] == "blocks.1"
        assert anatomy.residual["blocks.1.ffn"] == "blocks.1.ffn_norm"

    @pytest.mark.parametrize("build", [pre_ln.build, mix_ln.build])
    def test_each_sublayer_is_added_where_anatomy_says(
        self, build: Callable[[Size], nn.Module]
    ) -> None:
        model = build(SMALL)
        anatomy = Anatomy.of(model)
        assert len(anatomy.residual) == 8
        assert unexplained(model, anatomy, {"tokens": TOKENS}) == []

    def test_the_tree_tells_equal_blocks_once(self) -> None:
        assert Anatomy.of(mix_ln.build(SMALL)).tree() == (
            "4 blocks\n"
            "embed             embed      Embedding\n"
            "blocks.0          block      PostLNBlock\n"
            "  attention       attention  Attention, added to the block's input\n"
            "    q             q          Linear\n"
            "    k             k          Linear\n"
            "    v             v          Linear\n"
            "    o             o          Linear\n"
            "  attention_norm  norm       RMSNorm\n"
            "  ffn             ffn        FeedForward, added to its own input\n"
            "    gate          gate       Linear\n"
            "    up            up         Linear\n"
            "    down          down       Linear\n"
            "  ffn_norm        norm       RMSNorm\n"
            "blocks.1-3        block      PreLNBlock\n"
            "  attention_norm  norm       RMSNorm\n"
            "  attention       attention  Attention, added to the block's input\n"
            "    q             q          Linear\n"
            "    k             k          Linear\n"
            "    v             v          Linear\n"
            "    o             o          Linear\n"
            "  ffn_norm        norm       RMSNorm\n"
            "  ffn             ffn        FeedForward, added to ffn_norm's input\n"
            "    gate          gate       Linear\n"
            "    up            up         Linear\n"
            "    down          down       Linear\n"
            "norm              norm       RMSNorm\n"
            "head              head       Linear"
        )


def torch_encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def torch_decoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerDecoder(layer, 3)


class TestTorchTransformer:
    """torch.nn's own, whose FFN is no module: its last layer stands for it."""

    @pytest.mark.parametrize("norm_first", [True, False])
    def test_an_encoder_layers_sublayers_are_attention_and_its_second_linear(
        self, norm_first: bool
    ) -> None:
        found = roles(Anatomy.of(torch_encoder(norm_first)))
        assert {path[9:]: role for path, role in found.items() if path.startswith("layers.1.")} == {
            "self_attn": "attention", "self_attn.out_proj": "o", "linear1": "in", "linear2": "ffn",
            "dropout": "dropout", "dropout1": "dropout", "dropout2": "dropout", "norm1": "norm",
            "norm2": "norm",
        }  # fmt: skip

    def test_the_weights_of_the_second_linear_are_the_ffns_output_matrix(self) -> None:
        found = {p.name: p.role for p in Anatomy.of(torch_encoder(True)).parameters}
        assert found["layers.0.linear1.weight"] == "in"
        assert found["layers.0.linear2.weight"] == "out"
        assert found["layers.0.self_attn.in_proj_weight"] == "qkv"
        assert found["layers.0.self_attn.out_proj.weight"] == "o"

    @pytest.mark.parametrize("norm_first", [True, False])
    def test_each_sublayer_is_added_where_anatomy_says(self, norm_first: bool) -> None:
        x = torch.randn(2, 5, 8)
        encoder, decoder = torch_encoder(norm_first), torch_decoder(norm_first)
        for model, inputs, count in (
            (encoder, {"src": x}, 6),
            (decoder, {"tgt": x, "memory": torch.randn(2, 4, 8)}, 9),
        ):
            anatomy = Anatomy.of(model)
            assert len(anatomy.residual) == count
            assert unexplained(model, anatomy, inputs) == []

    def test_encoder_and_decoder_are_two_stacks(self) -> None:
        model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
        anatomy = Anatomy.of(model)
        assert [(s.stack, s.depth) for s in anatomy.sites if s.role == "block"] == [
            (0, 0), (0, 1), (1, 0), (1, 1), (1, 2),
        ]  # fmt: skip
        assert {s.path: s.stack for s in anatomy.sites if s.path.endswith("coder.norm")} == {
            "encoder.norm": 0,
            "decoder.norm": 1,
        }


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


class LeNet(nn.Module):
    """Defined backwards, so that only calls tell the order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv2 = nn.Conv2d(4, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, 2)


class TestPlainNetworks:
    """Without blocks the depth is the order of calls."""

    def test_an_mlps_layers_deepen_as_they_are_called(self) -> None:
        anatomy = Anatomy.of(mlp())
        assert anatomy.by_call_order and {site.depth for site in anatomy.sites} == {-1}
        ordered = anatomy.ordered(["0", "1", "2", "3", "4"])
        assert [(s.role, s.depth) for s in ordered.sites] == [
            ("ffn", 0), ("activation", 0), ("ffn", 1), ("activation", 1), ("head", 2),
        ]  # fmt: skip
        assert [p.depth for p in ordered.parameters] == [0, 0, 1, 1, 2, 2]

    def test_a_cnns_depth_follows_calls_and_not_definitions(self) -> None:
        anatomy = Anatomy.of(LeNet()).ordered(["conv1", "conv2", "norm", "fc"])
        assert {s.path: (s.role, s.depth) for s in anatomy.sites} == {
            "conv1": ("conv", 0),
            "conv2": ("conv", 1),
            "norm": ("norm", 1),
            "fc": ("head", 2),
        }

    def test_blocks_are_the_layers_but_the_head(self) -> None:
        assert [site.path for site in Anatomy.of(mlp()).select("blocks")] == ["0", "2"]
        assert [site.path for site in Anatomy.of(LeNet()).select("blocks")] == ["conv2", "conv1"]

    def test_a_single_layer_is_recorded_whatever_is_asked_for(self) -> None:
        anatomy = Anatomy.of(nn.Linear(3, 3))
        assert [site.path for site in anatomy.select("blocks")] == [""]

    def test_layers_called_again_keep_their_first_depth(self) -> None:
        ordered = Anatomy.of(mlp()).ordered(["0", "2", "0", "2", "4"])
        assert [s.depth for s in ordered.sites if s.type == "Linear"] == [0, 1, 2]

    def test_models_with_blocks_are_left_alone(self) -> None:
        anatomy = Anatomy.of(pre_ln.build(SMALL))
        assert anatomy.ordered(["head", "embed"]) is anatomy


class BasicBlock(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width // stride, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = (
            nn.Sequential(nn.Conv2d(width // 2, width, 1, 2, bias=False), nn.BatchNorm2d(width))
            if stride == 2
            else None
        )


class ResNet(nn.Module):
    """The shape of torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(4), BasicBlock(4))
        self.layer2 = nn.Sequential(BasicBlock(8, 2), BasicBlock(8))
        self.layer3 = nn.Sequential(BasicBlock(16, 2), BasicBlock(16), BasicBlock(16))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 2)


def test_a_resnets_stages_are_one_depth_axis() -> None:
    anatomy = Anatomy.of(ResNet())
    assert list(depths(anatomy).values()) == list(range(7))
    found = roles(anatomy)
    assert found["layer2.0"] == "block" and found["layer2.0.conv1"] == "conv"
    assert found["layer2.0.downsample.0"] == "conv" and found["layer2.0.bn2"] == "norm"
    assert (found["maxpool"], found["avgpool"], found["fc"]) == ("pool", "pool", "head")
    assert [path for path, role in found.items() if role == "other"] == [
        "layer1", "layer2", "layer2.0.downsample", "layer3", "layer3.0.downsample",
    ]  # fmt: skip


class NanoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(8, 24)
        self.c_proj = nn.Linear(8, 8)
        self.n_head = 2


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(8)
        self.attn = NanoAttention()
        self.ln_2 = nn.LayerNorm(8)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(8, 32), "c_proj": nn.Linear(32, 8)})


class NanoGPT(nn.Module):
    """The shape of nanoGPT's."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(11, 8),
                "wpe": nn.Embedding(16, 8),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([NanoBlock() for _ in range(3)]),
                "ln_f": nn.LayerNorm(8),
            }
        )
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]


def test_nanogpt_has_fused_attention_and_a_tied_head() -> None:
    anatomy = Anatomy.of(NanoGPT())
    found = roles(anatomy)
    assert found["transformer.wpe"] == "embed" and found["lm_head"] == "head"
    assert found["transformer.h.2.attn.c_attn"] == "qkv"
    assert found["transformer.h.2.attn.c_proj"] == "o"
    parts = anatomy.split("transformer.h.0.attn.c_attn.weight")
    assert [(role, tuple(part.shape)) for role, part in parts] == [
        ("q", (8, 8)), ("k", (8, 8)), ("v", (8, 8)),
    ]  # fmt: skip
    assert anatomy.tied == {"transformer.wte.weight": ("lm_head.weight",)}


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class ScaledBlock(nn.Module):
    """The shape of timm's, with attention as another MLP to keep it short."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(8), Mlp(), LayerScale()
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(8), Mlp(), LayerScale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


class SandwichBlock(nn.Module):
    """Peri-LN: norms on both sides, in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm1_out = nn.LayerNorm(8), Mlp(), nn.RMSNorm(8)
        self.norm2, self.mlp, self.norm2_out = nn.LayerNorm(8), Mlp(), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1_out(self.attn(self.norm1(x)))
        out: Tensor = x + self.norm2_out(self.mlp(self.norm2(x)))
        return out


class BareBlock(nn.Module):
    """No norm at all."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        out: Tensor = x + self.mlp(x)
        return out


@pytest.mark.parametrize(
    ("block", "branch"), [(ScaledBlock, "ls2"), (SandwichBlock, "norm2_out"), (BareBlock, "mlp")]
)
def test_what_a_sublayer_adds_is_found_behind_norms_and_scales(
    block: type[nn.Module], branch: str
) -> None:
    model = nn.Sequential(block(), block())
    anatomy = Anatomy.of(model)
    assert anatomy.branch["1.mlp"] == f"1.{branch}"
    assert len(anatomy.residual) == 4
    assert unexplained(model, anatomy, {"input": torch.randn(2, 3, 8)}) == []


def test_a_residual_that_definitions_do_not_tell_is_left_out() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp = Mlp(), Mlp()
            self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)

    anatomy = Anatomy.of(nn.ModuleList([Block(), Block()]))
    assert anatomy.residual == {}
    assert anatomy.branch["0.attn"] == "0.attn"
    assert "residual unknown" in anatomy.tree()


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([BareBlock() for _ in range(3)])
        self.right = nn.ModuleList([BareBlock() for _ in range(2)])
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(5)])


def test_a_longer_list_of_small_modules_is_no_depth_axis() -> None:
    anatomy = Anatomy.of(TwoTowers())
    assert [(s.path, s.stack) for s in anatomy.sites if s.role == "block"] == [
        ("left.0", 0), ("left.1", 0), ("left.2", 0), ("right.0", 1), ("right.1", 1),
    ]  # fmt: skip


def test_numbered_modules_are_stacks_by_name() -> None:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2, self.down3 = BasicBlock(4), BasicBlock(4), BasicBlock(4)
            self.up1, self.up2 = Mlp(), Mlp()
            self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3)

    anatomy = Anatomy.of(UNet())
    assert [(s.path, s.stack, s.depth) for s in anatomy.sites if s.role == "block"] == [
        ("down1", 0, 0), ("down2", 0, 1), ("down3", 0, 2), ("up1", 1, 0), ("up2", 1, 1),
    ]  # fmt: skip


def test_layers_of_a_plain_network_in_blocks_are_not_said_to_have_a_residual() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(3)]
    anatomy = Anatomy.of(nn.Sequential(*blocks))
    assert depths(anatomy) == {"0": 0, "1": 1, "2": 2}
    assert depths(anatomy, "ffn") == {"0.0": 0, "1.0": 1, "2.0": 2}
    assert anatomy.residual == anatomy.branch == {}


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("right.*", ["right.0", "right.1"]),
        ("right", ["right.0", "right.1"]),
        (r"left\.[12]", ["left.1", "left.2"]),
        (["left.0", "left.2"], ["left.0", "left.2"]),
        (["left.0.attn.0", "left.0.attn.2"], ["left.0.attn.0", "left.0.attn.2"]),
        ("**.attn", [f"left.{i}.attn" for i in range(3)] + [f"right.{i}.attn" for i in range(2)]),
    ],
)
def test_the_depth_axis_can_be_given(blocks: str | list[str], expected: list[str]) -> None:
    assert list(depths(Anatomy.of(TwoTowers(), blocks=blocks))) == expected


def test_each_given_pattern_is_a_stack() -> None:
    anatomy = Anatomy.of(TwoTowers(), blocks=["right.*", "left.*"])
    assert [(s.stack, s.depth) for s in anatomy.sites if s.role == "block"] == [
        (1, 0), (1, 1), (1, 2), (0, 0), (0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("blocks", ["nowhere.*", "[", ["left.*", "nowhere"]])
def test_blocks_that_match_nothing_are_refused_in_one_line(blocks: str | list[str]) -> None:
    with pytest.raises(InputError, match="No module of the model matches") as error:
        Anatomy.of(TwoTowers(), blocks=blocks)
    assert "\n" not in str(error.value)


def test_sites_are_selected_by_pattern_or_list() -> None:
    anatomy = Anatomy.of(pre_ln.build(SMALL))
    assert [s.path for s in anatomy.select("blocks.*.ffn")] == [f"blocks.{i}.ffn" for i in range(4)]
    assert [s.path for s in anatomy.select(["head", "blocks.0.*"])] == [
        "blocks.0.attention_norm", "blocks.0.attention", "blocks.0.ffn_norm", "blocks.0.ffn", "head",
    ]  # fmt: skip
    with pytest.raises(InputError, match="No site of the model matches 'blocks.9'"):
        anatomy.select("blocks.9")


def test_a_block_may_be_a_list_of_sublayers() -> None:
    layers = nn.ModuleList([nn.ModuleList([NanoAttention(), Mlp()]) for _ in range(3)])
    anatomy = Anatomy.of(nn.ModuleDict({"layers": layers}))
    assert {s.path: (s.role, s.depth) for s in anatomy.select("blocks")} == {
        f"layers.{i}.{j}": (role, i)
        for i in range(3)
        for j, role in enumerate(("attention", "ffn"))
    }
    assert anatomy.residual["layers.2.0"] == "layers.2.0"


def test_a_model_of_one_block_has_a_depth_axis() -> None:
    assert depths(Anatomy.of(nn.Sequential(nn.Embedding(5, 8), BareBlock()))) == {"1": 0}


def test_experts_in_a_list_are_experts_and_the_layer_beside_them_the_router() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = NanoAttention()
            self.mlp = nn.ModuleDict(
                {"gate": nn.Linear(8, 6), "experts": nn.ModuleList([Mlp() for _ in range(6)])}
            )

    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

    found = roles(Anatomy.of(Moe()))
    assert found["blocks.0.mlp.gate"] == "router"
    assert found["blocks.0.mlp.experts.3"] == "experts"
    assert found["blocks.0.mlp.experts.3.0"] == "in"
    assert found["blocks.0.mlp.experts.3.2"] == "out"


@pytest.mark.parametrize(
    "model",
    [pre_ln.build(SMALL), torch_encoder(True), mlp(), LeNet(), ResNet(), NanoGPT(), TwoTowers()],
    ids=lambda model: type(model).__name__,
)
def test_every_role_is_one_of_the_known(model: nn.Module) -> None:
    anatomy = Anatomy.of(model)
    assert {site.role for site in anatomy.sites} <= set(ROLES)
    assert {parameter.role for parameter in anatomy.parameters} <= set(ROLES)
