"""GPAS, gradient-preserving activation scaling (Chen et al., arXiv 2506.22049).

gpas(x) = x - silu(a) * stop_gradient(x): forward it scales the stream by 1 - silu(a), backward it is
the identity. One gate a per block, from 0, so that training starts from the plain architecture.
In Pre-LN and Sandwich it follows every addition; in DeepNorm and the Post-LN blocks of Mix-LN it acts
on the shortcut's copy alone, and the sublayer sees the stream unscaled."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples import deepnorm, mix_ln
from examples.language_model import LanguageModel, Size, norm
from examples.peri_ln import PeriLNBlock
from examples.post_ln import PostLNBlock
from examples.pre_ln import PreLNBlock


class GPAS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x - functional.silu(self.gate) * x.detach()


class PreBlock(PreLNBlock):
    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.gpas = GPAS()

    def forward(self, x: Tensor) -> Tensor:
        x = self.gpas(x + self.attention(self.attention_norm(x)))
        out: Tensor = self.gpas(x + self.ffn(self.ffn_norm(x)))
        return out


class SandwichBlock(PeriLNBlock):
    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.gpas = GPAS()

    def forward(self, x: Tensor) -> Tensor:
        x = self.gpas(x + self.post_attention_norm(self.attention(self.attention_norm(x))))
        out: Tensor = self.gpas(x + self.post_ffn_norm(self.ffn(self.ffn_norm(x))))
        return out


class PostBlock(PostLNBlock):
    """Post-LN; with ``alpha`` above 1 it is DeepNorm's block."""

    def __init__(self, size: Size, alpha: float = 1.0) -> None:
        super().__init__(size)
        self.gpas, self.alpha = GPAS(), alpha

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(self.alpha * self.gpas(x) + self.attention(x))
        out: Tensor = self.ffn_norm(self.alpha * self.gpas(x) + self.ffn(x))
        return out


def build(size: Size) -> LanguageModel:
    return LanguageModel(size, (PreBlock(size) for _ in range(size.blocks)))


def build_sandwich(size: Size) -> LanguageModel:
    return LanguageModel(size, (SandwichBlock(size) for _ in range(size.blocks)), enter=norm(size))


def build_deepnorm(size: Size) -> LanguageModel:
    alpha, beta = deepnorm.decoder_only(size.blocks)
    model = LanguageModel(size, (PostBlock(size, alpha) for _ in range(size.blocks)))
    deepnorm.scale(model, beta)
    return model


def build_mix(size: Size) -> LanguageModel:
    post = int(mix_ln.ALPHA * size.blocks)
    return LanguageModel(
        size, (PostBlock(size) if i < post else PreBlock(size) for i in range(size.blocks))
    )
