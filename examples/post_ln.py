"""Post-LN, as in the first Transformer (Vaswani et al., arXiv 1706.03762): norm(x + F(x)).

The stream is normalized after every addition, so its variance is 1 at every depth; the norms stand
in the way of the gradient, which is largest near the output (Xiong et al., arXiv 2002.04745)."""

from torch import Tensor, nn

from examples.language_model import Attention, FeedForward, LanguageModel, Size, norm


class PostLNBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = Attention(size)
        self.attention_norm = norm(size)
        self.ffn = FeedForward(size)
        self.ffn_norm = norm(size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        out: Tensor = self.ffn_norm(x + self.ffn(x))
        return out


def build(size: Size) -> LanguageModel:
    return LanguageModel(size, (PostLNBlock(size) for _ in range(size.blocks)))
