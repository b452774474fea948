"""Every architecture is the one it says it is: its defining identity, exact where it is exact."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dynscope
from dynscope import reports
from examples import (
    attn_res,
    bhyt,
    deepnorm,
    deepscale_lm,
    depth_graft,
    dyt,
    gpas,
    hyper_connections,
    keel,
    layernorm_scaling,
    linear_depth_memory,
    ln_free,
    mhc,
    mix_ln,
    moments,
    mup,
    peri_ln,
    pre_ln,
    pre_rmsnorm,
    xiong,
)
from examples.language_model import LanguageModel, Size
from examples.post_ln import PostLNBlock
from examples.text import Text
from examples.train import Recipe, train
from examples.zoo import ARCHITECTURES

SIZE = Size(width=32, heads=2, hidden=48, blocks=8, context=16)
WIDE = Size(width=256, heads=2, hidden=640, blocks=6, context=16)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def tokens(size: Size = SIZE, batch: int = 4) -> Tensor:
    return torch.randint(size.vocabulary, (batch, size.context))


@torch.no_grad()
def stream(model: LanguageModel, seen: Tensor) -> list[Tensor]:
    """What the first block takes, and what every block puts out."""
    x = model.embed(seen)
    states = [x if model.enter is None else model.enter(x)]
    for block in model.blocks:
        states.append(block(states[-1]))
    return states


def second_moment(x: Tensor) -> float:
    return float(x.detach().square().mean())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_is_recorded_whole_and_never_sees_the_future(
    architecture: str, tmp_path: Path
) -> None:
    recipe = Recipe(steps=4, batch=2, every=1, validate_every=2)
    model = train(architecture, Text.read(), tmp_path / "run.h5", recipe, SIZE)
    run = dynscope.load(tmp_path / "run.h5")
    blocks = run["activation/variance"]
    blocks = blocks[:, blocks.role == "block"]
    assert sorted(set(blocks["depth"].values)) == list(range(SIZE.blocks))
    assert bool(torch.isfinite(torch.tensor(blocks.values)).all())
    assert all(math.isfinite(x) for x in run.scalars("loss").values)
    gradients = run["gradient/norm"]
    assert bool(gradients.notnull().all()), gradients["name"].values[gradients.isnull().any("step")]
    assert len(reports.report(run).html) > 100_000
    seen = tokens()
    changed = seen.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % SIZE.vocabulary
    model.eval()
    torch.testing.assert_close(model(seen)[:, :9], model(changed)[:, :9])


def test_the_same_arguments_give_the_same_run(tmp_path: Path) -> None:
    recipe = Recipe(steps=3, batch=2)
    models = [train("mix_ln", Text.read(), tmp_path / "run.h5", recipe, SIZE) for _ in range(2)]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


# Xiong et al., arXiv 2002.04745: Lemma 2 and Theorem 1.


SEEDS = range(8)


@torch.no_grad()
def test_xiongs_hidden_norms_are_those_of_lemma_2() -> None:
    post, pre = torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    for seed in SEEDS:
        torch.manual_seed(seed)
        for post_ln, means in ((True, post), (False, pre)):
            x = torch.randn(8, 16, 256)
            for number, block in enumerate(xiong.Encoder(256, 8, post=post_ln).blocks):
                assert isinstance(block, xiong.Block)
                means[number] += second_moment(block.before_last_norm(x)) / len(SEEDS)
                x = block(x)
    depth = torch.arange(1, 9)
    torch.testing.assert_close(post, torch.full_like(post, 1.5), rtol=0.05, atol=0)
    assert bool((1 + depth / 2 < pre).all() and (pre < 1 + 3 * depth / 2).all())


@pytest.mark.slow
def test_xiongs_last_gradient_falls_with_depth_in_pre_ln_only() -> None:
    depths = (4, 8, 16, 32)
    pre, post = (
        [sum(xiong.last_gradient(256, depth, seed, post=p) for seed in SEEDS) for depth in depths]
        for p in (False, True)
    )
    scaled = [norm * depth**0.5 for norm, depth in zip(pre, depths, strict=True)]
    assert max(scaled) / min(scaled) < 1.2
    assert max(post) / min(post) < 1.4


# One architecture after the other


def test_pre_ln_adds_what_its_sublayers_make_of_the_normalized_stream() -> None:
    block = pre_ln.PreLNBlock(SIZE)
    x = torch.randn(2, SIZE.context, SIZE.width)
    between = x + block.attention(block.attention_norm(x))
    torch.testing.assert_close(block(x), between + block.ffn(block.ffn_norm(between)))


def test_post_ln_blocks_come_first_in_mix_ln_and_hold_the_mean_square_at_one() -> None:
    model = mix_ln.build(SIZE)
    kinds = [type(block) for block in model.blocks]
    assert kinds == [PostLNBlock] * 2 + [pre_ln.PreLNBlock] * 6
    squares = [second_moment(state) for state in stream(model, tokens())[1:]]
    assert squares[:2] == pytest.approx([1, 1], abs=1e-4)
    assert squares[2:] == sorted(squares[2:]) and squares[-1] > 1.2


def test_peri_ln_adds_two_of_variance_per_block_at_the_start() -> None:
    states = stream(peri_ln.build(WIDE), tokens(WIDE, 16))
    squares = [second_moment(state) for state in states]
    steps = [after - before for before, after in pairwise(squares)]
    assert squares[0] == pytest.approx(1, abs=1e-4)
    assert steps == pytest.approx([2.0] * WIDE.blocks, rel=0.1)


def test_layernorm_scaling_divides_both_norms_by_the_root_of_the_block_and_not_the_last() -> None:
    model = layernorm_scaling.build(SIZE)
    x = 3 * torch.randn(2, SIZE.context, SIZE.width)
    for number, block in enumerate(model.blocks, start=1):
        for each in ("attention_norm", "ffn_norm"):
            rms = second_moment(block.get_submodule(each)(x)) ** 0.5
            assert rms == pytest.approx(number**-0.5, abs=1e-5)
    assert second_moment(model.norm(x)) == pytest.approx(1, abs=1e-5)


def test_gpas_scales_forward_and_is_the_identity_backward() -> None:
    gate = gpas.GPAS().double()
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(gate(x), x)
    nn.init.constant_(gate.gate, 0.7)
    scale = 1 - float(nn.functional.silu(gate.gate.detach()))
    torch.testing.assert_close(gate(x), scale * x)
    jacobian = torch.autograd.functional.jacobian(gate, x)
    torch.testing.assert_close(jacobian, torch.eye(5, dtype=torch.float64), atol=1e-6, rtol=0)
    (slope,) = torch.autograd.grad((gate(x) * (g := torch.randn_like(x))).sum(), gate.gate)
    silu = torch.autograd.functional.jacobian(nn.functional.silu, gate.gate.detach())
    torch.testing.assert_close(slope, -silu * (g * x).sum())


@pytest.mark.parametrize(
    ("gated", "plain"),
    [
        ("gpas", "pre_ln"),
        ("gpas_sandwich", "peri_ln"),
        ("gpas_deepnorm", "deepnorm"),
        ("gpas_mix", "mix_ln"),
    ],
)
def test_gpas_starts_as_the_architecture_that_it_is_put_into(gated: str, plain: str) -> None:
    models = []
    for name in (gated, plain):
        torch.manual_seed(0)
        models.append(ARCHITECTURES[name](SIZE))
    torch.testing.assert_close(models[0](seen := tokens()), models[1](seen))


def test_gpas_leaves_what_a_post_ln_sublayer_sees_unscaled() -> None:
    block = gpas.PostBlock(SIZE, alpha=2.0)
    nn.init.constant_(block.gpas.gate, 1.0)
    x = torch.randn(2, SIZE.context, SIZE.width)
    shortcut = 2 * (1 - float(nn.functional.silu(block.gpas.gate.detach()))) * x
    between = block.attention_norm(shortcut + block.attention(x))
    shortcut = shortcut / x * between
    torch.testing.assert_close(block(x), block.ffn_norm(shortcut + block.ffn(between)))


def test_deepnorms_constants_are_those_of_the_paper() -> None:
    assert deepnorm.decoder_only(12) == pytest.approx((2.2134, 0.3195), abs=5e-5)
    assert deepnorm.encoder_only(32) == pytest.approx((2.8284, 0.25), abs=5e-5)
    encoder, decoder = deepnorm.encoder_decoder(6, 6)
    assert encoder == pytest.approx((1.4180, 0.4970), abs=5e-4)
    assert decoder == pytest.approx((2.0598, 0.3433), abs=5e-5)


def test_deepnorm_starts_value_output_and_ffn_smaller_by_beta() -> None:
    block = deepnorm.build(WIDE).blocks[2]
    _, beta = deepnorm.decoder_only(WIDE.blocks)
    for name, gain in {"attention.q": 1, "attention.k": 1, "attention.v": beta,
                       "attention.o": beta, "ffn.gate": beta, "ffn.down": beta}.items():  # fmt: skip
        weight = block.get_submodule(name).get_parameter("weight")
        assert float(weight.detach().std()) == pytest.approx(
            gain * (2 / sum(weight.shape)) ** 0.5, rel=0.02
        )


def test_keel_is_pre_ln_first_and_ends_every_other_sublayer_with_a_norm() -> None:
    model = keel.build(SIZE)
    first, second = model.blocks[0], model.blocks[1]
    assert isinstance(first, keel.KeelBlock) and isinstance(second, keel.KeelBlock)
    assert first.post_attention_norm is None and first.alpha == 1
    assert second.alpha == 2 * SIZE.blocks
    for state in stream(model, tokens())[1:]:
        assert second_moment(state) == pytest.approx(1, abs=1e-4)
    x = torch.randn(2, SIZE.context, SIZE.width)
    assert second.post_attention_norm is not None
    between = second.post_attention_norm(16 * x + second.attention(second.attention_norm(x)))
    expected = second.post_ffn_norm(16 * between + second.ffn(second.ffn_norm(between)))
    torch.testing.assert_close(second(x), expected)


def test_deepscale_lm_keeps_the_variance_at_one() -> None:
    keep, add = deepscale_lm.residual(192)
    assert keep**2 + add**2 == pytest.approx(1) and add**2 == pytest.approx(2 / 192)
    size = Size(width=256, heads=2, blocks=6, context=64)
    # Tokens as alike as those of text: a shared part of the embeddings stands for repetition.
    shared = torch.randn(16, 1, size.width) * deepscale_lm.TEXT**0.5
    x = shared + torch.randn(16, size.context, size.width) * (1 - deepscale_lm.TEXT) ** 0.5
    with torch.no_grad():
        for block in deepscale_lm.build(size).blocks:
            x = block(x)
            assert second_moment(x) == pytest.approx(1, abs=0.25)


def test_rms_and_compressed_norms_are_exactly_layer_norm() -> None:
    models = []
    for convert in (None, pre_rmsnorm.rms, pre_rmsnorm.compress):
        torch.manual_seed(0)
        model = pre_rmsnorm.build_layer_norm(SIZE).double()
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
        models.append(convert(model) if convert else model)
    torch.manual_seed(1)
    seen = tokens()
    outputs = [model(seen) for model in models]
    for output in outputs:
        torch.testing.assert_close(output, outputs[0], rtol=1e-9, atol=1e-10)
        output.square().mean().backward()
    plain, rms, compressed = (dict(model.named_parameters()) for model in models)
    assert compressed["embed.weight"].shape[1] == SIZE.width - 1
    for name, parameter in plain.items():
        head, _, leaf = name.rpartition(".")
        twin = rms.get(name, rms.get(f"{head}.parametrizations.{leaf}.original"))
        assert twin is not None and parameter.grad is not None
        torch.testing.assert_close(twin.grad, parameter.grad, rtol=1e-7, atol=1e-10)
        if compressed[name].shape == parameter.shape:
            torch.testing.assert_close(compressed[name].grad, parameter.grad, rtol=1e-7, atol=1e-10)


def test_dyt_is_a_scaled_tanh_that_starts_with_alpha_as_given() -> None:
    layer = dyt.DyT(SIZE, 0.8)
    x = torch.randn(3, SIZE.width)
    torch.testing.assert_close(layer(x), torch.tanh(0.8 * x))
    assert second_moment(stream(dyt.build(SIZE), tokens())[0]) == pytest.approx(1, rel=0.1)


def test_bhyt_is_bounded_and_its_shortcut_matches_the_exact_mean_square() -> None:
    layer = bhyt.BHyT(SIZE, 2.0)
    x = torch.randn(3, SIZE.width)
    rms = x.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(layer(x), torch.tanh(0.2 * x / rms), rtol=1e-4, atol=1e-5)
    assert float(layer(1e6 * x).detach().abs().max()) < 1
    # tanh(lambda x / (kappa rms)) has mean square (lambda / kappa)^2, and attention averages it.
    torch.manual_seed(0)
    block = bhyt.BHyTBlock(WIDE)
    nn.init.zeros_(block.attention.q.weight)  # uniform attention, as the estimate takes it to be
    x = torch.randn(16, WIDE.context, WIDE.width)
    added = second_moment(block.attention(block.attention_norm(x))[:, -1])
    assert float(block.added(WIDE.context).detach()) == pytest.approx(added, rel=0.15)
    torch.manual_seed(0)
    exact = bhyt.ExactBlock(SIZE)
    between = (y := x[..., :32]) + exact.attention(exact.attention_norm(y))
    torch.testing.assert_close(exact(y), between + exact.ffn(exact.ffn_norm(between)))


def test_hyper_connections_start_as_pre_ln_on_copies_of_the_stream() -> None:
    model = hyper_connections.build(SIZE)
    states = stream(model, tokens())
    for state in states:
        assert state.shape == (hyper_connections.STREAMS, 4, SIZE.context, SIZE.width)
        torch.testing.assert_close(state, state[:1].expand_as(state))
    block = model.blocks[0]
    assert isinstance(block, hyper_connections.HyperBlock)
    x = states[0][0]
    between = x + block.attention(block.attention_norm(x))
    torch.testing.assert_close(states[1][0], between + block.ffn(block.ffn_norm(between)))


@pytest.mark.parametrize("folded", [False, True])
def test_each_stream_is_a_site_with_numbers_of_its_own(folded: bool, tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.ffn = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            scale = torch.arange(1.0, 4.0).view(1, 3, 1, 1)
            out: Tensor = x.view(2, 3, 5, 8) * scale + self.ffn(self.norm(x.view(2, 3, 5, 8)))
            return out.flatten(0, 1) if folded else out

    blocks = nn.Sequential(Block(), Block(), Block())
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: object, out: Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    handle = blocks[1].register_forward_hook(keep)
    optimizer = torch.optim.SGD(blocks.parameters(), 0.1)
    axis = 0 if folded else 1
    with dynscope.attach(
        blocks, tmp_path / "run.h5", optimizer=optimizer, every=1, streams=(3, axis), summary=False
    ):
        blocks(torch.randn(6, 5, 8)).square().sum().backward()
        optimizer.step()
    handle.remove()
    run = dynscope.load(tmp_path / "run.h5")
    here = [i for i, site in enumerate(run.sites) if site.module == "1" and site.role == "block"]
    assert [run.sites[i].path for i in here] == ["1[0]", "1[1]", "1[2]"]
    assert [run.sites[i].stack for i in here] == [0, 1, 2]
    out, gradient = (x.detach().view(2, 3, 5, 8) for x in (kept[0], kept[0].grad) if x is not None)
    for name, expected in {
        "activation/variance": out.double().transpose(0, 1).flatten(1).var(1, correction=0),
        "activation_gradient/rms": gradient.double().square().mean((0, 2, 3)).sqrt(),
    }.items():
        assert run[name].values[0][here] == pytest.approx(expected.numpy(), rel=1e-5)


def test_an_axis_that_holds_no_streams_is_told_and_training_goes_on(tmp_path: Path) -> None:
    model = pre_ln.build(SIZE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dynscope.attach(
        model, tmp_path / "run.h5", optimizer=optimizer, every=1, streams=(3, 0), summary=False
    ):
        model(tokens()).sum().backward()
        optimizer.step()
    run = dynscope.load(tmp_path / "run.h5")
    assert any("holds no 3 streams" in gap.reason for gap in run.coverage)
    assert "ffn" in {site.role for site in run.sites}


def test_sinkhorn_makes_rows_and_columns_sum_to_one() -> None:
    matrices = mhc.sinkhorn(torch.randn(1000, 4, 4, dtype=torch.float64))
    torch.testing.assert_close(matrices.sum(-1), torch.ones(1000, 4).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(matrices.sum(-2), torch.ones(1000, 4).double(), rtol=0, atol=1e-3)


def test_products_of_mhc_matrices_cannot_grow_and_those_of_hyper_connections_can() -> None:
    def gain(factors: Tensor) -> float:
        product = torch.linalg.multi_dot(list(factors))
        return float(product.abs().sum(-1).max())

    free = torch.eye(4).double() + 0.3 * torch.randn(24, 4, 4, dtype=torch.float64)
    assert gain(mhc.sinkhorn(free)) < 2
    assert gain(free) > 2
    model = mhc.build(SIZE)
    for state in stream(model, tokens()):
        _, post, res = model.blocks[0].get_submodule("ffn_connection").weights(state)  # type: ignore[operator]
        torch.testing.assert_close(res.sum(-1), torch.ones_like(res[..., 0]), rtol=0, atol=1e-5)
        assert 0.8 < float(post.detach().min()) and float(post.detach().max()) < 1.2


def test_attention_residuals_start_as_the_mean_of_all_outputs() -> None:
    states = stream(attn_res.build(SIZE), tokens())
    for number, (h, sources) in enumerate(states):
        assert len(sources) == 2 * number + 1
        torch.testing.assert_close(h, torch.stack(sources).mean(0))


def test_block_attention_residuals_sum_sublayers_into_few_sources() -> None:
    model = attn_res.build_block(SIZE)
    whole = attn_res.build(SIZE)
    whole.load_state_dict(model.state_dict())
    states = stream(model, tokens())
    assert [len(state[1]) for state in states] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [len(s[1]) for s in stream(attn_res.build(SIZE, sublayers=4), tokens())] == [
        1, 2, 2, 3, 3, 4, 4, 5, 5,
    ]  # fmt: skip


def test_recursive_least_squares_remembers_what_was_written() -> None:
    keys = torch.randn(4, linear_depth_memory.KEY, dtype=torch.float64)
    values = torch.randn(4, 6, dtype=torch.float64)
    memory = torch.zeros(6, linear_depth_memory.KEY)
    p = 1e6 * torch.eye(linear_depth_memory.KEY)
    for key, value in zip(keys, values, strict=True):
        memory, p = linear_depth_memory.write(memory, p, key, value, torch.tensor(1.0))
    torch.testing.assert_close(memory @ keys.float().T, values.float().T, atol=1e-2, rtol=1e-2)


def test_grafted_layers_have_no_keys_and_values_and_send_gradients_to_their_sources() -> None:
    model = depth_graft.build(SIZE)
    names = [name for name, _ in model.named_parameters()]
    assert "blocks.3.attention.k.weight" in names and "blocks.4.attention.k.weight" not in names
    (grafted,) = {type(block.get_submodule("attention")) for block in model.blocks[4:]}
    assert grafted is depth_graft.GraftedAttention
    states = stream(model, tokens())
    assert len(states[-1][1]) == 4
    last = model.blocks[7].get_submodule("attention")
    assert isinstance(last, depth_graft.GraftedAttention)
    source = model.blocks[last.sources[0]].get_submodule("attention.v").get_parameter("weight")
    pairs = [(torch.randn(4, 16, 32), torch.randn(4, 16, 32)) for _ in range(4)]
    pairs[last.sources[0]][1].requires_grad_()
    last.graft(torch.randn(4, 16, 32), pairs).sum().backward()
    assert pairs[last.sources[0]][1].grad is not None and source.shape == (32, 32)


def test_norms_go_one_by_one_and_a_removed_one_is_linear() -> None:
    model = ln_free.build(SIZE)
    order = [
        name for norm in ln_free.norms(model) for name, m in model.named_modules() if m is norm
    ]
    assert order[0] == "blocks.0.ffn_norm" and order[8] == "blocks.0.attention_norm"
    assert order[-1] == "norm" and len(order) == 17
    model(tokens())
    layer = ln_free.norms(model)[0]
    x = torch.randn(2, SIZE.context, SIZE.width)
    for _ in range(3):
        layer(x)
    constant = layer.deviations.clone()
    layer.remove()
    y = torch.randn_like(x)
    torch.testing.assert_close(layer(x + y), layer(x) + layer(y) - layer(torch.zeros_like(x)))
    torch.testing.assert_close(layer.deviations, constant)
    ln_free.before_step(model, 0.0)
    assert sum(bool(norm.removed) for norm in ln_free.norms(model)) == 1
    ln_free.before_step(model, 1.0)
    assert all(bool(norm.removed) for norm in ln_free.norms(model))


def test_mup_keeps_the_size_of_an_update_at_any_width() -> None:
    def moved(width: int) -> float:
        torch.manual_seed(0)
        size = Size.of(depth=2, width=width)
        model = mup.build(size)
        optimizer = torch.optim.Adam(mup.parameter_groups(model, 1e-2))
        seen = tokens(size)
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                model(seen)[:, :-1].flatten(0, 1), seen[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
        return math.sqrt(second_moment(model(seen)))

    small, large = moved(64), moved(512)
    assert large / small == pytest.approx(1, abs=0.5)


# DeepScaleLM's moment rules, within the bands of the paper's own simulations (99 %)


def correlated(variance: float, r: float, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    shared = torch.randn(shape, dtype=torch.float64) * (r * variance) ** 0.5
    own = torch.randn(2, *shape, dtype=torch.float64) * ((1 - r) * variance) ** 0.5
    return shared + own[0], shared + own[1]


@pytest.mark.parametrize("variance", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("r", [0.2, 0.7])
def test_moment_rules_agree_with_simulation(variance: float, r: float) -> None:
    x, y = correlated(variance, r, (4000, 128))
    given = moments.Moments(0.0, variance, r * variance)
    weight = torch.randn(256, 128, dtype=torch.float64) * 0.1

    def seen(a: Tensor, b: Tensor) -> tuple[float, float, float]:
        mean = float((a.mean() + b.mean()) / 2)
        joint = float((a * b).mean()) - mean**2
        return mean, float(a.square().mean()) - float(a.mean()) ** 2, joint

    rule = moments.relu(given)
    assert seen(x.relu(), y.relu()) == pytest.approx(
        (rule.mean, rule.variance, rule.covariance), rel=0.034
    )
    rule = moments.gelu(given)
    assert seen(nn.functional.gelu(x), y)[:2] == pytest.approx(
        ((rule.mean + 0.0) / 2, rule.variance), rel=0.034
    )
    rule = moments.linear(given, 128, 0.01)
    assert seen(x @ weight.T, y @ weight.T)[1:] == pytest.approx(
        (rule.variance, rule.covariance), rel=0.028
    )
    rule = moments.layer_norm(given, 128)
    normed = [nn.functional.layer_norm(z, (128,)) for z in (x, y)]
    assert seen(*normed)[1:] == pytest.approx((rule.variance, rule.covariance), rel=0.032)
    # Backward: gradients of their own correlation, through the same layers.
    g, h = correlated(0.5, 0.3, (4000, 128))
    back = moments.Moments(0.0, 0.5, 0.15)
    rule = moments.relu_gradient(back, given)
    assert seen(g * (x > 0), h * (y > 0))[1:] == pytest.approx(
        (rule.variance, rule.covariance), rel=0.034
    )
    rule = moments.linear_gradient(back, 128, 0.01)
    through = torch.randn(128, 64, dtype=torch.float64) * 0.1
    assert seen(g @ through, h @ through)[1:] == pytest.approx(
        (rule.variance, rule.covariance), rel=0.05
    )
    leaf = x.clone().requires_grad_()
    nn.functional.layer_norm(leaf, (128,)).backward(g)
    assert leaf.grad is not None
    expected = moments.layer_norm_gradient(back, given).variance
    assert float(leaf.grad.square().mean()) == pytest.approx(expected, rel=0.032)


def test_dropouts_moments_agree_with_simulation() -> None:
    x = 0.7 + torch.randn(2_000_000, dtype=torch.float64)
    dropped = nn.functional.dropout(x, 0.2)
    rule = moments.dropout(moments.Moments(0.7, 1.0, 0.0), 0.2)
    assert float(dropped.mean()) == pytest.approx(rule.mean, rel=0.01)
    assert float(dropped.var()) == pytest.approx(rule.variance, rel=0.01)
    assert moments.dropout_gradient(moments.Moments(), 0.2).variance == pytest.approx(1.25)


def test_a_markov_source_has_the_entropy_that_it_says() -> None:
    text = Text.markov(tokens=200_000, vocabulary=16)
    pairs = torch.zeros(16, 16, dtype=torch.float64)
    pairs.index_put_(
        (text.train[:-1], text.train[1:]), torch.ones(len(text.train) - 1).double(), True
    )
    joint = pairs / pairs.sum()
    conditional = joint / joint.sum(1, keepdim=True).clamp_min(1e-12)
    entropy = -float(torch.special.xlogy(joint, conditional).sum())
    assert entropy == pytest.approx(text.entropy_rate, rel=0.01)
