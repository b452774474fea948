"""muP (Yang et al., arXiv 2203.03466) beside Peri-LN, as in HyperCLOVA X THINK (arXiv 2506.22403).

Rules under which the activations of a step, and so the best learning rate, do not depend on the width:
attention logits over the head's width instead of its root; Adam's learning rate of every matrix inside
by base / width; the logits by base / width, from a head that starts at 0. `BASE` is the width at which
nothing changes. `python -m examples.coordinate_check` shows it."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from examples.language_model import Attention, LanguageModel, Size, norm
from examples.peri_ln import PeriLNBlock

BASE = 128


class ScaledHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (BASE / self.in_features)


def build(size: Size) -> LanguageModel:
    blocks = [PeriLNBlock(size) for _ in range(size.blocks)]
    head, base = size.width // size.heads, BASE // size.heads
    for block in blocks:
        block.attention = Attention(size, scale=base**0.5 / head)
    model = LanguageModel(size, blocks, enter=norm(size))
    for name, module in model.blocks.named_modules():
        if isinstance(module, nn.Linear):
            # Spectral norms that do not depend on the width: variance over the number of inputs.
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if name.endswith(".q"):
                nn.init.zeros_(module.weight)
    model.head = ScaledHead(size.width, size.vocabulary, bias=False)
    nn.init.zeros_(model.head.weight)
    return model


def parameter_groups(model: LanguageModel, rate: float) -> Iterator[dict[str, Any]]:
    """For Adam: matrices inside the blocks by base / width, the rest as it is."""
    width = model.embed.embedding_dim
    inside = [p for p in model.blocks.parameters() if p.ndim == 2]
    known = {id(p) for p in inside}
    yield {"params": inside, "lr": rate * BASE / width}
    yield {"params": [p for p in model.parameters() if id(p) not in known], "lr": rate}
