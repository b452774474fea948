"""The skeleton that every architecture here shares: a small LLaMA-like language model.

RoPE, SwiGLU, RMSNorm (eps 1e-6), no biases. What a block does with its norms and its residual
stream, and how the stream is entered and left, is what an architecture's own file says.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """The defaults train in about a minute on two cores."""

    vocabulary: int = 256  # a token is a byte
    width: int = 128
    heads: int = 4
    hidden: int = 352
    blocks: int = 12
    context: int = 64

    @classmethod
    def of(cls, depth: int, width: int, heads: int = 4, context: int = 64) -> "Size":
        """Of that many blocks and channels; the FFN is 8/3 as wide, in steps of 32.

        Raises `ValueError` where the heads do not divide the width into even parts.
        """
        if depth < 1 or width % (2 * heads):
            raise ValueError(
                f"depth {depth}, width {width}, {heads} heads: give one block or more, "
                "and a width that is a multiple of twice the heads"
            )
        hidden = math.ceil(8 * width / 3 / 32) * 32
        return cls(width=width, heads=heads, hidden=hidden, blocks=depth, context=context)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions: (batch, token, width) to the same.

    ``scale`` multiplies the logits; by default 1 / sqrt(width of a head).
    """

    def __init__(self, size: Size, scale: float | None = None) -> None:
        super().__init__()
        self.heads, self.scale = size.heads, scale
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.k = nn.Linear(size.width, size.width, bias=False)
        self.v = nn.Linear(size.width, size.width, bias=False)
        self.o = nn.Linear(size.width, size.width, bias=False)
        half = size.width // size.heads // 2
        speed = 10_000.0 ** (-torch.arange(half) / half)
        self.angles: Tensor
        self.register_buffer(
            "angles", torch.arange(size.context)[:, None] * speed, persistent=False
        )

    def rotate(self, x: Tensor) -> Tensor:
        angles = self.angles[: x.shape[-2]]
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.q(x), self.k(x), self.v(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each (batch, token, width), before the rotation."""
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        mixed = functional.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True, scale=self.scale
        )
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    """SwiGLU: (batch, token, width) to the same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


def norm(size: Size) -> nn.RMSNorm:
    return nn.RMSNorm(size.width, eps=1e-6)


class LanguageModel(nn.Module):
    """Embedding, the given blocks, a final norm and a head: (batch, token) to logits.

    ``enter`` makes of the embedding what the first block takes, ``leave`` of the last block's
    output what the final norm takes; ``final`` is that norm. Linear layers start from
    N(0, 0.02² · 768 / width): at a small width a plain 0.02 leaves the residual branches too weak
    to show anything. The embedding starts from N(0, 0.632²), as in the code of Mix-LN (arXiv
    2412.13795).
    """

    def __init__(
        self,
        size: Size,
        blocks: Iterable[nn.Module],
        *,
        enter: nn.Module | None = None,
        leave: nn.Module | None = None,
        final: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.enter = enter
        self.blocks = nn.ModuleList(blocks)
        self.leave = leave
        self.norm = final or norm(size)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02 * math.sqrt(768 / size.width))
        nn.init.normal_(self.embed.weight, std=0.632)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.enter is not None:
            x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        if self.leave is not None:
            x = self.leave(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
