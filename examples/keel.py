"""Keel (arXiv 2601.19895): norm(alpha * x + F(norm(x))), with alpha the number of sublayers.

Post-LN with a highway: the stream is weighted so heavily that the product of all outer norms'
Jacobians tends to 1 at any depth, and an inner norm feeds the sublayer. The first attention is plain
Pre-LN, and the first FFN has alpha = 1."""

from torch import Tensor, nn

from examples.language_model import Attention, FeedForward, LanguageModel, Size, norm


class KeelBlock(nn.Module):
    def __init__(self, size: Size, block: int) -> None:
        super().__init__()
        self.first = block == 0
        self.alpha = 1.0 if self.first else 2.0 * size.blocks
        self.attention_norm = norm(size)
        self.attention = Attention(size)
        self.post_attention_norm = None if self.first else norm(size)
        self.ffn_norm = norm(size)
        self.ffn = FeedForward(size)
        self.post_ffn_norm = norm(size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.alpha * x + self.attention(self.attention_norm(x))
        if self.post_attention_norm is not None:
            x = self.post_attention_norm(x)
        out: Tensor = self.post_ffn_norm(self.alpha * x + self.ffn(self.ffn_norm(x)))
        return out


def build(size: Size) -> LanguageModel:
    return LanguageModel(size, (KeelBlock(size, i) for i in range(size.blocks)))
