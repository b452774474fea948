"""Claims about what an architecture's own parameters learn, read from the trained models."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples import attn_res, bhyt, dyt, gpas, hyper_connections, mhc
from examples.language_model import LanguageModel
from examples.studies.runs import RECIPE, SEEDS, SIZE, text, trained
from examples.studies.study import Chart, Curve, Finding, Outcome, spread, verdict
from examples.text import batch

BLOCKS = list(range(1, SIZE.blocks + 1))


def unseen() -> Tensor:
    """Tokens that training never saw: (8, context)."""
    random = torch.Generator().manual_seed(1)
    return batch(text("docs").validation, RECIPE.batch, SIZE.context, random)[0]


@torch.no_grad()
def states(model: LanguageModel, seen: Tensor) -> list[Tensor]:
    """The state in front of every block, and behind the last one."""
    x = model.embed(seen)
    found = [x if model.enter is None else model.enter(x)]
    for block in model.blocks:
        found.append(block(found[-1]))
    return found


def gates() -> Outcome:
    """GPAS's gates after training, and its Jacobian."""
    scales = []
    for seed in SEEDS:
        model = trained("gpas", seed)
        found = [m.gate.detach() for m in model.modules() if isinstance(m, gpas.GPAS)]
        scales.append([1 - float(functional.silu(gate)) for gate in found])
    layer = gpas.GPAS().double()
    nn.init.constant_(layer.gate, 0.8)
    x = torch.randn(16, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(layer, x)
    off = float((jacobian - torch.eye(16).double()).abs().max())
    middle = [sorted(each)[1] for each in zip(*scales, strict=True)]
    shrinks = sum(scale < 1 for scale in middle)
    return Outcome(
        [
            Finding(
                "Chen et al., 2506.22049",
                "The Jacobian of GPAS is the identity while it scales forward",
                f"at gate 0.8: forward factor {1 - float(functional.silu(layer.gate.detach())):.3f}"
                f", Jacobian off the identity by {off:.1e}",
                verdict(off < 1e-6, off < 1e-3),
            ),
            Finding(
                "Chen et al., 2506.22049",
                "Gates learn to shrink the stream",
                f"factor 1 - silu(a) per block {spread(middle)}; below 1 in {shrinks} of 12",
                verdict(shrinks >= 9, shrinks >= 6),
            ),
        ],
        [
            Chart("GPAS after 300 steps", "block", "forward factor 1 - silu(a)",
                  [Curve(f"seed {s}", BLOCKS, c) for s, c in zip(SEEDS, scales, strict=True)])
        ],
    )  # fmt: skip


@torch.no_grad()
def residual_products(model: LanguageModel, seen: Tensor) -> list[float]:
    """Largest absolute row sum of the product of all residual mixings up to each sublayer."""
    gains, product = [], None
    for block, x in zip(model.blocks, states(model, seen), strict=False):
        assert isinstance(block, (mhc.MHCBlock, hyper_connections.HyperBlock))
        sublayer = nn.Sequential(block.attention_norm, block.attention)
        between = block.attention_connection(x, sublayer)
        for connection, state in (
            (block.attention_connection, x),
            (block.ffn_connection, between),
        ):
            if isinstance(connection, mhc.Connection):
                mixing = connection.weights(state)[2]
            else:
                mixing = connection.weights(state)[0][..., 1:].mT
            product = mixing if product is None else mixing @ product
            gains.append(float(product.abs().sum(-1).amax(-1).mean()))
    return gains


def streams() -> Outcome:
    """The composite gain of hyper-connections and of mHC."""
    seen = unseen()
    free, bound = (
        [residual_products(trained(name, seed), seen) for seed in SEEDS]
        for name in ("hyper_connections", "mhc")
    )
    most = {"free": [max(each) for each in free], "bound": [max(each) for each in bound]}
    axis = [i / 2 for i in range(1, 25)]
    return Outcome(
        [
            Finding(
                "2512.24880",
                "mHC: products of its residual mixings stay bounded (at most about 1.6)",
                f"largest composite row sum over 24 sublayers {spread(most['bound'])}",
                verdict(max(most["bound"]) < 2, max(most["bound"]) < max(most["free"])),
            ),
            Finding(
                "2512.24880",
                "Hyper-connections: they grow without bound (up to 3,000 at 27 B parameters)",
                f"largest composite row sum over 24 sublayers {spread(most['free'])}",
                verdict(min(most["free"]) > 10, min(most["free"]) > max(most["bound"])),
            ),
        ],
        [
            Chart("Composite gain of the residual mixings after 300 steps", "block", "row sum",
                  [Curve(f"{title}, seed {s}", axis, c)
                   for title, curves in (("HC", free), ("mHC", bound))
                   for s, c in zip(SEEDS, curves, strict=True)])
        ],
    )  # fmt: skip


@torch.no_grad()
def depth_weights() -> Outcome:
    """What the sublayers of AttnRes read from: their own block, and the embedding."""
    seen, own, first = unseen(), [], []
    for seed in SEEDS:
        model = trained("attn_res", seed)
        latest, embedding = [], []
        for block, (_, sources) in zip(model.blocks, states(model, seen)[1:], strict=True):
            mix = block.get_submodule("ffn_mix")
            assert isinstance(mix, attn_res.DepthMix)
            weights = mix.weights(sources).mean((1, 2, 3)) * len(sources)  # 1 is a plain mean
            latest.append(float(weights[-2:].mean()))
            embedding.append(float(weights[0]))
        own.append(latest)
        first.append(embedding)
    late = [sum(c[6:]) / 6 for c in own]
    kept = [sum(c[6:]) / 6 for c in first]
    return Outcome(
        [
            Finding(
                "2603.15031", "AttnRes: deep layers read most from the latest outputs",
                "weight of the block's own two outputs over a plain mean's, blocks 7 to 12: "
                f"{spread(late)}",
                verdict(min(late) > 1.5, min(late) > 1),
            ),
            Finding(
                "2603.15031", "AttnRes: and keep reading the embedding",
                f"weight of the embedding over a plain mean's, blocks 7 to 12: {spread(kept)}",
                verdict(min(kept) > 1, sum(kept) / 3 > 0.5),
            ),
        ],
        [
            Chart("AttnRes after 300 steps: weight over that of a plain mean, seed 0",
                  "block", "ratio",
                  [Curve("own outputs", BLOCKS, own[0]), Curve("embedding", BLOCKS, first[0])])
        ],
    )  # fmt: skip


@torch.no_grad()
def saturation() -> Outcome:
    """Share of a tanh norm's inputs beyond 2, where it is flat; DyT's alpha beside 1 / std."""
    seen = unseen()
    shares: dict[str, list[list[float]]] = {"dyt": [], "bhyt": []}
    correlation = []
    for seed in SEEDS:
        for name, kept in shares.items():
            model, found, alphas, inverse = trained(name, seed), [], [], []
            for block, x in zip(model.blocks, states(model, seen), strict=False):
                layer = block.get_submodule("attention_norm")
                if isinstance(layer, dyt.DyT):
                    inner = layer.alpha * x
                    alphas.append(float(layer.alpha))
                    inverse.append(float(1 / x.std()))
                else:
                    assert isinstance(layer, bhyt.BHyT)
                    inner = layer.scale * x / (bhyt.KAPPA * bhyt.square(x).sqrt())
                found.append(float((inner.abs() > 2).float().mean()))
            kept.append(found)
            if alphas:
                pair = torch.tensor([alphas, inverse])
                correlation.append(float(torch.corrcoef(pair)[0, 1]))
    deep = {name: [max(c) for c in curves] for name, curves in shares.items()}
    return Outcome(
        [
            Finding(
                "Zhu et al., 2503.10622", "DyT: alpha follows 1 / std of its input",
                f"correlation over 12 blocks after 300 steps {spread(correlation)}",
                verdict(min(correlation) > 0.8, min(correlation) > 0),
            ),
            Finding(
                "2601.09719", "BHyT never saturates, by Chebyshev's bound; DyT can",
                f"largest share of inputs beyond 2 in any block: DyT {spread(deep['dyt'])}, BHyT "
                f"{spread(deep['bhyt'])}",
                verdict(max(deep["bhyt"]) < 0.01 < min(deep["dyt"]),
                        max(deep["bhyt"]) < min(deep["dyt"])),
            ),
        ],
        [
            Chart("Share of the first norm's inputs beyond 2 after 300 steps", "block", "share",
                  [Curve(f"{name}, seed {s}", BLOCKS, c)
                   for name, curves in shares.items() for s, c in zip(SEEDS, curves, strict=True)])
        ],
    )  # fmt: skip
