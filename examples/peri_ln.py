"""Peri-LN (Kim et al., arXiv 2502.02732): x + norm(F(norm(x))), with a norm of the embedding too.

Whatever a sublayer puts out is brought to its norm's gain before it is added: at the start every
sublayer adds variance 1, so the stream's variance grows linearly with depth. Sandwich-LN and Gemma 2
have the same block."""

from torch import Tensor, nn

from examples.language_model import Attention, FeedForward, LanguageModel, Size, norm


class PeriLNBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = norm(size)
        self.attention = Attention(size)
        self.post_attention_norm = norm(size)
        self.ffn_norm = norm(size)
        self.ffn = FeedForward(size)
        self.post_ffn_norm = norm(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post_attention_norm(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.post_ffn_norm(self.ffn(self.ffn_norm(x)))
        return out


def build(size: Size) -> LanguageModel:
    blocks = (PeriLNBlock(size) for _ in range(size.blocks))
    return LanguageModel(size, blocks, enter=norm(size))
