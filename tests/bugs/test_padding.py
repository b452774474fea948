"""Padded positions do not count, whatever way the outputs lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynscope
from dynscope.errors import InputError
from tests.live import failures, reasons, site

pytestmark = pytest.mark.usefixtures("quick_writer")
OPTIONS: dict[str, Any] = {"every": 1, "sites": "leaves", "summary": False}
BATCH, TOKENS, WIDTH = 3, 7, 4
LENGTHS = torch.tensor([7, 2, 5])
MASK = (torch.arange(TOKENS) < LENGTHS[:, None]).long()


class Model(nn.Module):
    """A layer whose output lies as ``layout`` says; its padded positions are far off."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.layer: nn.Module = nn.Identity()
        self.scale = nn.Parameter(torch.ones(()))
        if layout == "tbc":
            self.attention = nn.MultiheadAttention(4, 1, batch_first=False)
        if layout == "bct":
            self.layer = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = x * self.scale
        if self.layout == "tbc":
            x = x.transpose(0, 1)
        elif self.layout == "bct":
            x = x.transpose(1, 2)
        elif self.layout == "flat":
            x = x.flatten(0, 1)
        elif self.layout == "heads":
            x = x.unflatten(2, (2, 2)).transpose(1, 2)
        elif self.layout == "scalar":
            x = x.sum(-1)
        out: Tensor = self.layer(x)
        return out


REAL: dict[str, Callable[[Tensor], Tensor]] = {
    "btc": lambda y: y[MASK.bool()],
    "tbc": lambda y: y.transpose(0, 1)[MASK.bool()],
    "bct": lambda y: y.transpose(1, 2)[MASK.bool()],
    "flat": lambda y: y[MASK.bool().flatten()],
    "heads": lambda y: y.transpose(1, 2)[MASK.bool()],
    "scalar": lambda y: y[MASK.bool()],
}


def batch() -> Tensor:
    x = torch.randn(BATCH, TOKENS, WIDTH)
    x[~MASK.bool()] = 1e3
    return x


def record(
    path: Path,
    model: nn.Module,
    batches: list[Tensor],
    mask: Any,
    masks: list[Tensor] | None = None,
) -> dynscope.Run:
    """One step over all batches, their losses added up before a single backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dynscope.attach(model, path, optimizer=optimizer, mask=mask, **OPTIONS):
        given = masks or [MASK] * len(batches)
        losses = [model(x, m).pow(3).sum() for x, m in zip(batches, given, strict=True)]
        torch.stack(losses).sum().backward()
        optimizer.step()
    return dynscope.load(path)


@pytest.mark.parametrize("layout", REAL)
def test_statistics_are_those_of_the_real_positions(tmp_path: Path, layout: str) -> None:
    torch.manual_seed(0)
    model = Model(layout)
    batches = [batch(), batch()]
    outputs = [model(x).detach().requires_grad_() for x in batches]
    torch.stack([y.pow(3).sum() for y in outputs]).sum().backward()
    real = torch.cat([REAL[layout](y.detach()).flatten() for y in outputs]).double()
    gradients = torch.cat([REAL[layout](y.grad).flatten() for y in outputs if y.grad is not None])
    run = record(tmp_path / "run.h5", model, batches, "attention_mask")
    expected = {
        "activation/count": len(real),
        "activation/n_calls": 2,
        "activation/mean": real.mean(),
        "activation/variance": real.var(correction=0),
        "activation/absmax": real.abs().max(),
        "activation/median_abs": real.abs().median(),
        "activation_gradient/norm": gradients.double().norm(),
        "activation_gradient/absmax": gradients.abs().max(),
    }
    for name, value in expected.items():
        tolerance = 0.02 if name == "activation/median_abs" else 1e-5
        assert site(run, name, "layer") == pytest.approx(float(value), rel=tolerance), name
    assert not failures(run)


def test_the_place_of_a_spike_is_that_in_the_whole_batch(tmp_path: Path) -> None:
    x = batch()
    x[2, 3, 1] = -500.0
    run = record(tmp_path / "run.h5", Model("btc"), [x], "attention_mask")
    here = [s.path for s in run.sites].index("layer")
    found = [int(run[f"massive/{n}"].values[0, here, 0]) for n in ("channel", "token", "batch")]
    assert found == [1, 3, 2] and float(run["massive/value"].values[0, here, 0]) == -500.0


@pytest.mark.parametrize(
    "mask",
    [MASK, lambda args, kwargs: args[1].bool(), lambda args, kwargs: None],
    ids=["tensor", "function", "function without one"],
)
def test_a_mask_is_a_tensor_or_a_function_too(tmp_path: Path, mask: Any) -> None:
    run = record(tmp_path / "run.h5", Model("btc"), [batch()], mask)
    whole = BATCH * TOKENS * WIDTH
    wanted = (
        int(MASK.sum()) * WIDTH
        if torch.is_tensor(mask) or mask(((), MASK), {}) is not None
        else whole
    )
    assert site(run, "activation/count", "layer") == wanted


def test_a_gradient_is_masked_as_its_own_forward_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ones = Model("btc"), torch.ones(BATCH, TOKENS, dtype=torch.long)
    first, second = batch(), torch.randn(BATCH, TOKENS, WIDTH)
    run = record(tmp_path / "run.h5", model, [first, second], "attention_mask", [MASK, ones])
    true = torch.cat([3 * first[MASK.bool()].flatten() ** 2, 3 * second.flatten() ** 2])
    assert site(run, "activation_gradient/norm", "layer") == pytest.approx(float(true.norm()), 1e-5)


def test_angles_are_those_of_real_tokens(tmp_path: Path) -> None:
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ffn = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            turned = torch.where(x.abs().amax(-1, keepdim=True) > 100, -x, x + self.ffn(x))
            return turned

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Turn(), Turn()])

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model, x = Two(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dynscope.attach(
        model,
        tmp_path / "run.h5",
        optimizer=optimizer,
        mask="attention_mask",
        every=1,
        summary=False,
    ):
        model(x, attention_mask=MASK).sum().backward()
        optimizer.step()
    run = dynscope.load(tmp_path / "run.h5")
    with torch.no_grad():
        real = x[MASK.bool()].double()
        after = model.blocks[0](x)[MASK.bool()].double()
    angle = torch.acos(torch.cosine_similarity(real, after, dim=-1)).mean() / torch.pi
    assert site(run, "activation/angular_distance", "blocks.0") == pytest.approx(float(angle), 1e-4)


def test_what_has_no_positions_counts_whole_and_what_does_not_fit_is_told(tmp_path: Path) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.odd = nn.Linear(WIDTH, 2), nn.Identity()

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            out: Tensor = self.pool(x.mean(1)).sum() + self.odd(x[:, :2]).sum()
            return out

    run = record(tmp_path / "run.h5", Pooled(), [batch()], "attention_mask")
    assert site(run, "activation/count", "pool") == BATCH * 2
    assert "does not fit" in reasons(run, "odd") and not reasons(run, "pool")


@pytest.mark.parametrize("name", ["attention_mask", "decoder_attention_mask"])
def test_encoder_and_decoder_have_masks_of_their_own_though_equally_long(
    tmp_path: Path, name: str
) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.head = nn.Identity()

        def forward(self, x: Tensor, attention_mask: Tensor, decoder_attention_mask: Tensor) -> Any:
            return self.head(self.decoder(self.encoder(x)))

    model, path = Pair(), tmp_path / "run.h5"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dynscope.attach(model, path, optimizer=optimizer, mask=name, **OPTIONS):
        model(torch.randn(BATCH, TOKENS, WIDTH), MASK, MASK.flip(0)).square().sum().backward()
        optimizer.step()
    run = dynscope.load(path)
    own, other = ("encoder", "decoder") if name == "attention_mask" else ("decoder", "encoder")
    assert site(run, "activation/count", own) == int(MASK.sum()) * WIDTH
    for outside in (other, "head"):
        assert site(run, "activation/count", outside) == BATCH * TOKENS * WIDTH
        assert "that the mask is of" in reasons(run, outside)
    assert "mask" not in reasons(run, own)


def test_a_mask_that_cannot_be_used_is_told_and_training_goes_on(tmp_path: Path) -> None:
    additive = (1.0 - MASK) * -1e4
    for i, (bad, why) in enumerate(
        [(torch.ones(3, 7, 2), "give (batch, tokens)"), (additive, "negative"), ("no", "expected")]
    ):
        path = tmp_path / f"{i}.h5"
        run = record(path, Model("btc"), [batch()], lambda args, kwargs, bad=bad: bad)
        assert why in " ".join(failures(run)) or i == 2
        assert "cannot be used" in reasons(run, "") and failures(run)
        assert site(run, "activation/count", "layer") == BATCH * TOKENS * WIDTH
    with pytest.raises(InputError, match="name of an argument"):
        dynscope.attach(nn.Linear(2, 2), tmp_path / "other.h5", mask=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name, given",
    [
        ("extended", MASK[:, None, None, :]),
        ("trailing", MASK[..., None].bool()),
        ("ones and zeros as numbers", MASK.float()),
        ("a list", MASK.tolist()),
    ],
)
def test_masks_come_in_several_shapes_and_types(tmp_path: Path, name: str, given: Any) -> None:
    torch.manual_seed(0)
    x = batch()
    run = record(tmp_path / "run.h5", Model("btc"), [x], lambda args, kwargs: given)
    assert not failures(run) and not reasons(run, "layer")
    assert site(run, "activation/variance", "layer") == pytest.approx(
        float(x[MASK.bool()].double().var(correction=0)), rel=1e-5
    )


def test_pytorchs_own_masks_mark_the_padding(tmp_path: Path) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(WIDTH, 1, 8, batch_first=True)

        def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
            out: Tensor = self.encoder(x, src_key_padding_mask=src_key_padding_mask)
            return out

    run = record(
        tmp_path / "run.h5",
        Encoder(),
        [batch()],
        "src_key_padding_mask",
        [~MASK.bool()],
    )
    assert site(run, "activation/count", "encoder.linear2") == int(MASK.sum()) * WIDTH


def test_a_mask_may_lie_in_the_batch_that_the_model_is_called_with(tmp_path: Path) -> None:
    class Batched(Model):
        def forward(self, x: Any, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(x["x"])

    given: Any = {"x": batch(), "attention_mask": MASK}
    run = record(tmp_path / "run.h5", Batched("btc"), [given], "attention_mask")
    assert site(run, "activation/count", "layer") == int(MASK.sum()) * WIDTH


def test_a_name_that_the_model_is_not_called_with_is_told(tmp_path: Path) -> None:
    run = record(tmp_path / "run.h5", Model("btc"), [batch()], "attn_mask")
    assert site(run, "activation/count", "layer") == BATCH * TOKENS * WIDTH
    assert "called without attn_mask" in reasons(run, "")


def test_numbers_without_an_axis_and_mixed_orders_are_no_failure(tmp_path: Path) -> None:
    """A loss is a number; tokens flattened before the batch cannot be told from the other way."""

    class Odd(Model):
        def __init__(self, layout: str) -> None:
            super().__init__(layout)
            self.loss = nn.MSELoss()
            self.flattened = nn.Identity()

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            flat = self.flattened(y.flatten(0, 1))
            out: Tensor = self.loss(flat, torch.zeros_like(flat))
            return out

    run = record(tmp_path / "run.h5", Odd("tbc"), [batch()], "attention_mask")
    assert not failures(run) and not reasons(run, "loss")
    assert site(run, "activation/count", "layer") == int(MASK.sum()) * WIDTH
    assert site(run, "activation/count", "flattened") == BATCH * TOKENS * WIDTH
    assert "does not fit" in reasons(run, "flattened")


def test_heads_keep_their_channels(tmp_path: Path) -> None:
    """The largest element of (batch, head, token, channel), and the share of each row's mean."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    x[1, 1, 3] = 60.0  # head 1, channel 1
    found = {}
    for name, mask in (("masked", MASK), ("all", torch.ones_like(MASK))):
        path = tmp_path / f"{name}.h5"
        run = record(path, Model("heads"), [x], "attention_mask", [mask])
        i = [s.path for s in run.sites].index("layer")
        found[name] = [
            int(run[f"massive/{n}"].values[0, i, 0]) for n in ("channel", "token", "batch")
        ]
    assert found["masked"][0] == found["all"][0] == 1
    assert found["masked"][1:] == [1, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["after", "before", "in place", "per block", "checkpointed"])
def test_compiled_forwards_have_masks_of_their_own(tmp_path: Path, how: str) -> None:
    """Two forwards with different masks before one backward, as in eager mode, without a break."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
            )

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            for block in self.blocks:
                if how == "checkpointed":
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
            return x

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, options = Blocks(), dict[str, Any](backend="aot_eager", fullgraph=True)
    xs = [torch.randn(BATCH, TOKENS, WIDTH) for _ in range(2)]
    masks = [MASK, MASK.roll(1, 0)]
    running: Any = model
    if how == "before":
        running = torch.compile(model, **options)
    elif how == "in place":
        model.compile(**options)
    elif how == "per block":
        for block in model.blocks:
            block.compile(**options)
    twin = record(tmp_path / "eager.h5", _plain(model), xs, "attention_mask", masks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dynscope.attach(
        running, tmp_path / "run.h5", optimizer=optimizer, mask="attention_mask", **OPTIONS
    ):
        if how in ("after", "checkpointed"):
            running = torch.compile(model, **options)
        for _ in range(2):
            losses = [running(x, m).pow(3).sum() for x, m in zip(xs, masks, strict=True)]
            torch.stack(losses).sum().backward()
            optimizer.step()
    run = dynscope.load(tmp_path / "run.h5")
    assert not torch._dynamo.utils.counters["graph_break"]
    assert not failures(run) and "mask" not in reasons(run, "")
    for path in ("blocks.0.0", "blocks.1.1"):
        for name in ("count", "variance", "absmax"):
            metric = f"activation/{name}"
            assert site(run, metric, path, 1) == pytest.approx(site(twin, metric, path), rel=1e-5)
        metric = "activation_gradient/norm"
        assert site(run, metric, path, 1) == pytest.approx(site(twin, metric, path), rel=1e-5)


def _plain(model: nn.Module) -> Any:
    """A copy that is not compiled."""
    plain = type(model)()
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_function_is_not_called_in_compiled_code_and_that_is_told(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = Model("btc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"optimizer": optimizer, "mask": lambda args, kwargs: args[1]}
    with dynscope.attach(model, tmp_path / "run.h5", **OPTIONS, **options):
        torch.compile(model, backend="aot_eager", fullgraph=True)(batch(), MASK).sum().backward()
        optimizer.step()
    run = dynscope.load(tmp_path / "run.h5")
    assert site(run, "activation/count", "layer") == BATCH * TOKENS * WIDTH
    assert "was not seen to begin" in reasons(run, "")


def test_gradients_of_one_forward_may_come_in_two_backwards(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, xs = Model("btc"), [batch(), batch()]
    masks = [MASK, torch.ones_like(MASK)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dynscope.attach(
        model, tmp_path / "run.h5", optimizer=optimizer, mask="attention_mask", **OPTIONS
    ):
        outputs = [model(x, m) for x, m in zip(xs, masks, strict=True)]
        for i in (1, 0, 0):  # the last forward first, the first one twice
            outputs[i].pow(3).sum().backward(retain_graph=True)
        optimizer.step()
    run = dynscope.load(tmp_path / "run.h5")
    first, second = 3 * xs[0][MASK.bool()] ** 2, 3 * xs[1] ** 2
    true = float(torch.cat([first.flatten(), first.flatten(), second.flatten()]).double().norm())
    assert site(run, "activation_gradient/norm", "layer") == pytest.approx(true, rel=1e-5)


def test_recomputed_blocks_have_the_mask_of_their_forward_or_say_that_it_is_not_known(
    tmp_path: Path,
) -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            out: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)
            return out

    for batches in (1, 2):
        xs = [batch().requires_grad_() for _ in range(batches)]
        masks = [MASK, torch.ones_like(MASK)][:batches]
        path = tmp_path / f"{batches}.h5"
        run = record(path, Checkpointed("btc"), xs, "attention_mask", masks)
        gradient = site(run, "activation_gradient/norm", "layer")
        if batches == 1:
            true = 3 * xs[0].detach()[MASK.bool()] ** 2
            assert gradient == pytest.approx(float(true.norm()), rel=1e-5)
        else:
            assert np.isnan(gradient) and "not known" in reasons(run, "layer")
        assert site(run, "activation/n_calls", "layer") == batches
