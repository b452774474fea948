"""Mix-LN (Li et al., arXiv 2412.13795): the first quarter of the blocks are Post-LN,
norm(x + F(x)), which holds their output at variance 1; the others are Pre-LN."""

from torch import Tensor, nn

from examples.language_model import Attention, FeedForward, LanguageModel, Size, norm
from examples.pre_ln import PreLNBlock

ALPHA = 0.25


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
    post = int(ALPHA * size.blocks)
    return LanguageModel(
        size, (PostLNBlock(size) if i < post else PreLNBlock(size) for i in range(size.blocks))
    )
