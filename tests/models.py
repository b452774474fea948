"""Small live models for tests, and bare-hook twins of what a recorder measures."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Wrap = Callable[[nn.Module, Tensor], Tensor]


def directly(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = module(x)
    return out


def reentrant(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(module, x, use_reentrant=True)
    return out


def nonreentrant(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(module, x, use_reentrant=False)
    return out


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class FFN(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.activation, self.dropout = nn.ReLU(inplace=True), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.down(self.activation(self.up(x))))
        return out


class Block(nn.Module):
    """Pre-LN."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.ffn_norm, self.ffn = nn.LayerNorm(width), FFN(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """A Pre-LN decoder with dropout, in-place activations and a tied head."""

    def __init__(
        self, layers: int = 3, width: int = 16, dropout: float = 0.1, wrap: Wrap = directly
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.wrap = wrap

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.wrap(block, x)
        out: Tensor = self.head(self.norm(x))
        return out


def batches(steps: int, micro: int = 1, seed: int = 0) -> list[list[Tensor]]:
    """Random token batches (4, 9): ``micro`` of them per step."""
    random = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(32, (4, 9), generator=random) for _ in range(micro)] for _ in range(steps)
    ]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
