"""DeepScaleLM ("Transformers Get Stable", Kedia et al., arXiv 2403.09635): lambda x + beta F(norm(x)).

lambda² + beta² = 1 with beta² = 2 / layers, and every matrix starts so that its sublayer keeps the
variance at 1. Attention averages over tokens, so its matrices must make up for how little tokens have
in common: r is their correlation, followed from block to block. Dropout 0; ReLU as in the paper."""

import math

from torch import Tensor, nn

from examples.language_model import Attention, LanguageModel, Size, norm

TEXT = 0.221  # correlation of two embedded tokens of natural text, which repeats its tokens


def residual(layers: int) -> tuple[float, float]:
    """(lambda, beta) of a model of that many layers."""
    squared = min(1.0, 2 / layers)
    return math.sqrt(1 - squared), math.sqrt(squared)


def after_ffn(r: float) -> float:
    """Correlation of two tokens after a ReLU feed-forward layer."""
    return r + (math.sqrt(1 - r * r) - r * math.acos(r)) / math.pi


class DeepScaleBlock(nn.Module):
    def __init__(self, size: Size, r: float) -> None:
        """``r``: correlation of two tokens of the stream that comes in."""
        super().__init__()
        self.keep, self.add = residual(2 * size.blocks)
        self.r, self.between = r, self.mixed(r, 1.0)
        self.attention_norm = norm(size)
        self.attention = Attention(size)
        self.ffn_norm = norm(size)
        wide = 4 * size.width
        self.ffn = nn.Sequential(
            nn.Linear(size.width, wide, bias=False),
            nn.ReLU(),
            nn.Linear(wide, size.width, bias=False),
        )

    def mixed(self, r: float, added: float) -> float:
        """Correlation of the stream once a sublayer whose own is ``added`` has been added."""
        return self.keep**2 * r + self.add**2 * added

    @property
    def leaving(self) -> float:
        return self.mixed(self.between, after_ffn(self.between))

    def start(self) -> None:
        width = len(self.attention.o.weight)
        for linear in (self.attention.q, self.attention.k):
            nn.init.normal_(linear.weight, std=width**-0.5)
        for linear in (self.attention.v, self.attention.o):
            nn.init.normal_(linear.weight, std=(width**2 * self.r) ** -0.25)
        for weight in self.ffn.parameters():
            nn.init.normal_(weight, std=(width**2 * 2) ** -0.25)

    def forward(self, x: Tensor) -> Tensor:
        x = self.keep * x + self.add * self.attention(self.attention_norm(x))
        out: Tensor = self.keep * x + self.add * self.ffn(self.ffn_norm(x))
        return out


def build(size: Size) -> LanguageModel:
    blocks: list[DeepScaleBlock] = []
    for _ in range(size.blocks):
        blocks.append(DeepScaleBlock(size, blocks[-1].leaving if blocks else TEXT))
    model = LanguageModel(size, blocks)
    nn.init.normal_(model.embed.weight, std=1.0)
    for block in blocks:
        block.start()
    return model
