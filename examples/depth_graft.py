"""Depth graft: OUR READING of an abstract (DepthGraft); topology and weights are not public.

The deeper half has no key and value projections: a deep layer attends with keys and values rebuilt
from two layers above it, one of the first quarter and one of the second, aligned by stride, with a
learned weight for each. The cache shrinks, and deep layers send their gradients straight to the source
layers' projections."""

import torch
from torch import Tensor, nn

from examples.language_model import Attention, FeedForward, LanguageModel, Size, norm

Pair = tuple[Tensor, Tensor]  # keys and values
State = tuple[Tensor, list[Pair]]  # the stream, and those of every layer that has them


class GraftedAttention(Attention):
    """Has no projection for keys and values: ``sources`` are the layers to take them from."""

    def __init__(self, size: Size, sources: tuple[int, int]) -> None:
        super().__init__(size)
        del self.k, self.v
        self.sources = sources
        self.mix = nn.Parameter(torch.full((2, 2), 0.5))  # (keys, values) x (shallow, middle)

    def graft(self, x: Tensor, pairs: list[Pair]) -> Tensor:
        shallow, middle = (pairs[i] for i in self.sources)
        k, v = (w[0] * a + w[1] * b for w, a, b in zip(self.mix, shallow, middle, strict=True))
        return self.attend(self.q(x), k, v)


class GraftBlock(nn.Module):
    def __init__(self, size: Size, block: int) -> None:
        super().__init__()
        self.attention_norm = norm(size)
        self.attention = attention(size, block)
        self.ffn_norm = norm(size)
        self.ffn = FeedForward(size)

    def forward(self, state: State) -> State:
        x, pairs = state
        h, own = self.attention_norm(x), self.attention
        if isinstance(own, GraftedAttention):
            x = x + own.graft(h, pairs)
        else:
            pairs = [*pairs, (own.k(h), own.v(h))]
            x = x + own.attend(own.q(h), *pairs[-1])
        return x + self.ffn(self.ffn_norm(x)), pairs


def attention(size: Size, block: int) -> Attention:
    half, quarter = size.blocks // 2, max(1, size.blocks // 4)
    if block < half or half < 2:
        return Attention(size)
    step = (block - half) % quarter
    return GraftedAttention(size, (step, min(quarter + step, half - 1)))


class Enter(nn.Module):
    def forward(self, x: Tensor) -> State:
        return x, []


class Leave(nn.Module):
    def forward(self, state: State) -> Tensor:
        return state[0]


def build(size: Size) -> LanguageModel:
    blocks = (GraftBlock(size, i) for i in range(size.blocks))
    return LanguageModel(size, blocks, enter=Enter(), leave=Leave())
