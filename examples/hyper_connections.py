"""Hyper-connections (Zhu et al., arXiv 2409.19606): n residual streams and learned paths between them.

A sublayer reads a mixture of the streams (alpha's first column), its output is added to all of them
(beta), and the streams are mixed among themselves (the other columns). Each weight is a constant plus
a small part that depends on the token. They start as n copies of the embedding of which the l-th
sublayer reads one; at the end they are added up. Here the state is (stream, batch, token, width)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.language_model import Attention, FeedForward, LanguageModel, Size, norm

STREAMS = 4


class Connection(nn.Module):
    """Around one sublayer, the l-th: reads from the streams and writes back to them."""

    def __init__(self, size: Size, sublayer: int) -> None:
        super().__init__()
        reads = functional.one_hot(torch.tensor([sublayer % STREAMS]), STREAMS).T
        self.alpha = nn.Parameter(torch.cat([reads, torch.eye(STREAMS)], 1).float())
        self.beta = nn.Parameter(torch.ones(STREAMS))
        self.norm = norm(size)
        self.to_alpha = nn.Parameter(torch.zeros(size.width, 1 + STREAMS))
        self.to_beta = nn.Parameter(torch.zeros(size.width))
        self.scales = nn.Parameter(torch.full((2,), 0.01))

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """alpha (batch, token, stream, 1 + stream) and beta (batch, token, stream) at state x."""
        seen = self.norm(x).movedim(0, -2)
        alpha = self.alpha + self.scales[0] * torch.tanh(seen @ self.to_alpha)
        return alpha, self.beta + self.scales[1] * torch.tanh(seen @ self.to_beta)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        alpha, beta = self.weights(x)
        mixed = torch.einsum("sbtd,btsk->kbtd", x, alpha)
        return mixed[1:] + beta.movedim(-1, 0).unsqueeze(-1) * sublayer(mixed[0])


class HyperBlock(nn.Module):
    def __init__(self, size: Size, block: int) -> None:
        super().__init__()
        self.attention_connection = Connection(size, 2 * block)
        self.attention_norm = norm(size)
        self.attention = Attention(size)
        self.ffn_connection = Connection(size, 2 * block + 1)
        self.ffn_norm = norm(size)
        self.ffn = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_connection(x, lambda h: self.attention(self.attention_norm(h)))
        out: Tensor = self.ffn_connection(x, lambda h: self.ffn(self.ffn_norm(h)))
        return out


class Expand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(STREAMS, *x.shape)


class Reduce(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0)


def build(size: Size) -> LanguageModel:
    blocks = (HyperBlock(size, i) for i in range(size.blocks))
    return LanguageModel(size, blocks, enter=Expand(), leave=Reduce())
