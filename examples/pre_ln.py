"""Pre-LN (Xiong et al., arXiv 2002.04745): x + F(norm(x)). The residual stream is never normalized,
so its variance grows with depth."""

from torch import Tensor, nn

from examples.language_model import Attention, FeedForward, LanguageModel, Size, norm


class PreLNBlock(nn.Module):
    attention_norm: nn.Module
    ffn_norm: nn.Module

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = norm(size)
        self.attention = Attention(size)
        self.ffn_norm = norm(size)
        self.ffn = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


def build(size: Size) -> LanguageModel:
    return LanguageModel(size, (PreLNBlock(size) for _ in range(size.blocks)))
