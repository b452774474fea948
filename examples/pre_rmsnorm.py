"""Pre-RMSNorm and Pre-CRMSNorm (Jiang et al., arXiv 2305.14858): a Pre-LN model, exactly, for less.

LayerNorm subtracts the mean over channels and RMSNorm does not. Take the mean out of everything that
writes to the stream, and there is none to subtract: `rms` converts a model so, and it stays the same
function through training. A stream of mean zero needs one channel less: `compress` drops it."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from examples.language_model import LanguageModel, Size
from examples.pre_ln import PreLNBlock

EPSILON = 1e-6


class LayerNormBlock(PreLNBlock):
    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.attention_norm = nn.LayerNorm(size.width, EPSILON)
        self.ffn_norm = nn.LayerNorm(size.width, EPSILON)


class ZeroMean(nn.Module):
    """Takes the mean over a matrix's outputs out of it: what it writes has mean zero."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean(self.dim, keepdim=True)


class RMSNorm(nn.Module):
    """LayerNorm without the mean, keeping its gain and bias."""

    def __init__(self, of: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias = of.weight, of.bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, EPSILON) + self.bias


class CRMSNorm(RMSNorm):
    """Of d - 1 channels; the last one is what brings their sum to zero, and is written out again."""

    def forward(self, x: Tensor) -> Tensor:
        last = -x.sum(-1, keepdim=True)
        square = (x.square().sum(-1, keepdim=True) + last.square()) / (x.shape[-1] + 1)
        whole = torch.cat([x, last], -1) * torch.rsqrt(square + EPSILON)
        return self.weight * whole + self.bias


def writers(model: LanguageModel) -> list[tuple[nn.Module, int]]:
    """What writes to the stream, and the dimension of its weight that counts outputs."""
    blocks = [block for block in model.blocks if isinstance(block, PreLNBlock)]
    linears = [linear for block in blocks for linear in (block.attention.o, block.ffn.down)]
    return [(model.embed, 1), *((linear, 0) for linear in linears)]


def renorm(model: LanguageModel, kind: type[RMSNorm]) -> None:
    """Put ``kind`` in place of every norm, with the gains and biases there are."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (nn.LayerNorm, RMSNorm)):
                setattr(module, name, kind(child))  # type: ignore[arg-type]


def rms(model: LanguageModel) -> LanguageModel:
    """Convert a Pre-LN model in place, for training too: its weights lose their mean at each use."""
    for writer, dim in writers(model):
        parametrize.register_parametrization(writer, "weight", ZeroMean(dim))
    renorm(model, RMSNorm)
    return model


@torch.no_grad()
def compress(model: LanguageModel) -> LanguageModel:
    """Drop the last channel of the stream of a Pre-LN model, in place."""
    for writer, dim in writers(model):
        zero = ZeroMean(dim)(writer.get_parameter("weight"))
        writer.weight = nn.Parameter(zero.narrow(dim, 0, zero.shape[dim] - 1).clone())
    renorm(model, CRMSNorm)
    return model


def build_layer_norm(size: Size) -> LanguageModel:
    """The Pre-LN model with LayerNorm that the others are conversions of."""
    blocks = (LayerNormBlock(size) for _ in range(size.blocks))
    return LanguageModel(size, blocks, final=nn.LayerNorm(size.width, EPSILON))


def build(size: Size) -> LanguageModel:
    return rms(build_layer_norm(size))


def build_compressed(size: Size) -> LanguageModel:
    return compress(build_layer_norm(size))
