"""DeepNorm (Wang et al., "DeepNet", arXiv 2203.00555): norm(alpha * x + F(x)).

Post-LN whose shortcut is weighted by alpha > 1 and whose value, output and FFN matrices start smaller
by beta < 1 (Xavier normal; query and key keep gain 1). Together they bound how far the first steps
move the model's output, at any depth."""

from torch import Tensor, nn

from examples.language_model import LanguageModel, Size
from examples.post_ln import PostLNBlock


def encoder_only(layers: int) -> tuple[float, float]:
    """(alpha, beta) of a stack of encoder layers."""
    return (2 * layers) ** 0.25, (8 * layers) ** -0.25


def decoder_only(layers: int) -> tuple[float, float]:
    """(alpha, beta) of a stack of decoder layers."""
    return (2 * layers) ** 0.25, (8 * layers) ** -0.25


def encoder_decoder(n: int, m: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """(alpha, beta) of the encoder's n layers, and of the decoder's m."""
    size = (n**4 * m) ** (1 / 16)
    return (0.81 * size, 0.87 / size), ((3 * m) ** 0.25, (12 * m) ** -0.25)


class DeepNormBlock(PostLNBlock):
    def __init__(self, size: Size, alpha: float) -> None:
        super().__init__(size)
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(self.alpha * x + self.attention(x))
        out: Tensor = self.ffn_norm(self.alpha * x + self.ffn(x))
        return out


def scale(model: LanguageModel, beta: float) -> None:
    """Draw the matrices of every block anew: Xavier normal, with gain beta but for q and k."""
    for name, module in model.blocks.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight, 1.0 if name.endswith((".q", ".k")) else beta)


def build(size: Size) -> LanguageModel:
    alpha, beta = decoder_only(size.blocks)
    model = LanguageModel(size, (DeepNormBlock(size, alpha) for _ in range(size.blocks)))
    scale(model, beta)
    return model
