"""LayerNorm Scaling (Sun et al., "The Curse of Depth", arXiv 2502.05795): x + F(norm(x) / sqrt(l)).

Pre-LN in which both norms of block l (counted from 1) are divided by sqrt(l), a constant. Deep blocks
then add less, and the variance of the stream grows slower than linearly. The final norm is not
scaled."""

from torch import Tensor, nn

from examples.language_model import LanguageModel, Size, norm
from examples.pre_ln import PreLNBlock


class ScaledNorm(nn.Module):
    def __init__(self, size: Size, block: int) -> None:
        super().__init__()
        self.norm = norm(size)
        self.scale = block**-0.5

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x) * self.scale
        return out


class ScaledBlock(PreLNBlock):
    def __init__(self, size: Size, block: int) -> None:
        super().__init__(size)
        self.attention_norm = ScaledNorm(size, block)
        self.ffn_norm = ScaledNorm(size, block)


def build(size: Size) -> LanguageModel:
    return LanguageModel(size, (ScaledBlock(size, i + 1) for i in range(size.blocks)))
