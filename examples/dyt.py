"""DyT, dynamic tanh (Zhu et al., arXiv 2503.10622): gain * tanh(alpha * x) + bias in place of a norm.

No statistics: what a norm does to large values, tanh does by saturating. alpha is one learned number
per layer; the embedding is scaled by a learned number that starts at sqrt(width)."""

import torch
from torch import Tensor, nn

from examples.language_model import LanguageModel, Size
from examples.pre_ln import PreLNBlock


class DyT(nn.Module):
    def __init__(self, size: Size, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.gain = nn.Parameter(torch.ones(size.width))
        self.bias = nn.Parameter(torch.zeros(size.width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.tanh(self.alpha * x) + self.bias


class Scale(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class DyTBlock(PreLNBlock):
    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.attention_norm = DyT(size, 0.8)  # as LLaMA 7B: more before the attention
        self.ffn_norm = DyT(size, 0.2)


def build(size: Size) -> LanguageModel:
    model = LanguageModel(
        size,
        (DyTBlock(size) for _ in range(size.blocks)),
        enter=Scale(size.width**0.5),
        final=DyT(size, 0.2),
    )
    nn.init.normal_(model.embed.weight, std=size.width**-0.5)  # the scale makes it 1
    return model
