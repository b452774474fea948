"""BHyT, bounded hyperbolic tanh (arXiv 2601.09719): gain * tanh(lambda * x / (kappa * rms(x))).

A norm whose output is bounded: by Chebyshev's inequality at most 1 / kappa² of the channels exceed
kappa times the rms. The second norm of a block need not read the stream again: its mean square is that
of the first plus what attention is expected to add, ||W_v W_o||² lambda² / (kappa² tokens width).
`build_exact` computes both."""

import torch
from torch import Tensor, nn

from examples.language_model import LanguageModel, Size
from examples.pre_ln import PreLNBlock

KAPPA = 10.0


class BHyT(nn.Module):
    def __init__(self, size: Size, start: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(start))  # the paper's lambda
        self.gain = nn.Parameter(torch.ones(size.width))

    def forward(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        if mean_square is None:
            mean_square = square(x)
        return self.gain * torch.tanh(self.scale * x / (KAPPA * (mean_square + 1e-6).sqrt()))


def square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


class BHyTBlock(PreLNBlock):
    exact = False
    attention_norm: BHyT
    ffn_norm: BHyT

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.attention_norm = BHyT(size, 2.0)
        self.ffn_norm = BHyT(size, 1.0)

    def added(self, tokens: int) -> Tensor:
        """The mean square that attention is expected to add."""
        through = self.attention.o.weight @ self.attention.v.weight
        c = through.square().sum() / (tokens * len(through))
        return c * (self.attention_norm.scale / KAPPA) ** 2

    def forward(self, x: Tensor) -> Tensor:
        entering = square(x)
        x = x + self.attention(self.attention_norm(x, entering))
        middle = square(x) if self.exact else entering + self.added(x.shape[-2])
        out: Tensor = x + self.ffn(self.ffn_norm(x, middle))
        return out


class ExactBlock(BHyTBlock):
    exact = True


def build(size: Size) -> LanguageModel:
    return LanguageModel(size, (BHyTBlock(size) for _ in range(size.blocks)))


def build_exact(size: Size) -> LanguageModel:
    return LanguageModel(size, (ExactBlock(size) for _ in range(size.blocks)))
