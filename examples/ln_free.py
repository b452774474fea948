"""LN removal (Heimersheim, arXiv 2409.13710): a trained GPT is fine-tuned while its norms are taken out.

A norm that divides by a constant is linear and could be folded into the next matrix. Norm by norm,
on a schedule, the standard deviation of the token is replaced by its mean, calibrated on data; the
first position, whose activations are far larger, has a constant of its own. First the norms in front
of the FFNs, then those in front of attention, at last the final one."""

import torch
from torch import Tensor, nn

from examples.language_model import LanguageModel, Size
from examples.pre_ln import PreLNBlock

START, GAP = 0.4, 0.02  # of training: when the first norm goes, and then each other


class RemovableNorm(nn.LayerNorm):
    """LayerNorm until `remove` is called; from then on it divides by what it used to on average."""

    deviations: Tensor  # mean standard deviation of (the first position, all others)
    removed: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__(size.width)
        self.register_buffer("deviations", torch.zeros(2))
        self.register_buffer("removed", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.removed:
            if self.training:
                self.calibrate(x.detach())
            return super().forward(x)
        first = torch.arange(x.shape[-2], device=x.device)[:, None] == 0
        deviation = torch.where(first, self.deviations[0], self.deviations[1])
        return (x - x.mean(-1, keepdim=True)) / deviation * self.weight + self.bias

    def calibrate(self, x: Tensor) -> None:
        """A running mean over some fifty batches."""
        std = x.std(-1, correction=0)
        now = torch.stack([std[..., 0].mean(), std[..., 1:].mean()])
        self.deviations.lerp_(now, 0.02 if self.deviations[1] else 1.0)

    def remove(self) -> None:
        self.removed.fill_(True)


class Block(PreLNBlock):
    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.attention_norm = RemovableNorm(size)
        self.ffn_norm = RemovableNorm(size)


def norms(model: LanguageModel) -> list[RemovableNorm]:
    """In the order in which they go."""
    found = [n for n, m in model.named_modules() if isinstance(m, RemovableNorm)]
    found.sort(key=lambda n: ("ffn_norm" not in n, "attention_norm" not in n))
    return [m for n in found if isinstance(m := model.get_submodule(n), RemovableNorm)]


def before_step(model: LanguageModel, progress: float) -> None:
    """Take out every norm whose time has come; ``progress`` of training runs from 0 to 1."""
    for i, each in enumerate(norms(model)):
        if progress >= START + i * min(GAP, (0.9 - START) / len(norms(model))):
            each.remove()


def build(size: Size) -> LanguageModel:
    return LanguageModel(size, (Block(size) for _ in range(size.blocks)), final=RemovableNorm(size))
