"""mHC, manifold-constrained hyper-connections (arXiv 2512.24880): streams that are mixed doubly
stochastically.

X <- H_res X + H_post F(H_pre X), as in hyper-connections, but H_res is brought by Sinkhorn's iteration
to rows and columns that sum to 1, so that no product of them over depth can grow; H_pre and H_post are
bounded by sigmoids. All three depend on the token, through one norm of all streams together."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from examples.hyper_connections import STREAMS, Expand, Reduce
from examples.language_model import Attention, FeedForward, LanguageModel, Size, norm

ITERATIONS = 20


def sinkhorn(logits: Tensor) -> Tensor:
    """The nearly doubly stochastic matrices of exp(logits): (..., n, n), rows last normalized."""
    log = logits
    for _ in range(ITERATIONS):
        log = log - log.logsumexp(-2, keepdim=True)
        log = log - log.logsumexp(-1, keepdim=True)
    return log.exp()


class Connection(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        n = STREAMS
        self.norm = nn.RMSNorm(n * size.width, eps=1e-6)
        self.phi = nn.Parameter(torch.zeros(n * size.width, n + n + n * n))
        nn.init.normal_(self.phi, std=0.02)
        self.scales = nn.Parameter(torch.full((3,), 0.01))
        # At the start: the mean of the streams is read, 1 written to each, none mixed.
        self.pre = nn.Parameter(torch.full((n,), 1 / n).logit())
        self.post = nn.Parameter(torch.zeros(n))
        self.res = nn.Parameter(8 * (torch.eye(n) - 1))

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H_pre, H_post (batch, token, stream) and H_res (batch, token, to, from) at state x."""
        seen = self.norm(x.movedim(0, -2).flatten(-2)) @ self.phi
        pre, post, res = seen.split([STREAMS, STREAMS, STREAMS**2], -1)
        a = self.scales
        return (
            torch.sigmoid(a[0] * pre + self.pre),
            2 * torch.sigmoid(a[1] * post + self.post),
            sinkhorn(a[2] * res.unflatten(-1, (STREAMS, STREAMS)) + self.res),
        )

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        pre, post, res = self.weights(x)
        added = sublayer(torch.einsum("bts,sbtd->btd", pre, x))
        return torch.einsum("btos,sbtd->obtd", res, x) + torch.einsum("bts,btd->sbtd", post, added)


class MHCBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_connection = Connection(size)
        self.attention_norm = norm(size)
        self.attention = Attention(size)
        self.ffn_connection = Connection(size)
        self.ffn_norm = norm(size)
        self.ffn = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_connection(x, lambda h: self.attention(self.attention_norm(h)))
        out: Tensor = self.ffn_connection(x, lambda h: self.ffn(self.ffn_norm(h)))
        return out


def build(size: Size) -> LanguageModel:
    blocks = (MHCBlock(size) for _ in range(size.blocks))
    return LanguageModel(size, blocks, enter=Expand(), leave=Reduce())
