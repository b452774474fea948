"""Attention residuals (arXiv 2603.15031): a sublayer reads a softmax-weighted mean of all outputs so far.

Instead of a running sum, h_l = sum_i a_i v_i over the embedding v_0 and the outputs of all earlier
sublayers, a = softmax(w_l . norm(v_i)), with a learned query w_l that starts at 0: a plain mean. The
last mean goes to the head. `build_block` keeps sums over a few sublayers instead of every output. A
block's state is (h, sources), h being what comes next: (batch, token, width)."""

import torch
from torch import Tensor, nn

from examples.language_model import Attention, FeedForward, LanguageModel, Size, norm

State = tuple[Tensor, list[Tensor]]


class DepthMix(nn.Module):
    """The mean of the sources, weighted by a learned query: (source, batch, token, width) to one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = norm(size)
        self.query = nn.Linear(size.width, 1, bias=False)

    def forward(self, sources: list[Tensor]) -> Tensor:
        return (self.weights(sources) * torch.stack(sources)).sum(0)

    def weights(self, sources: list[Tensor]) -> Tensor:
        """(source, batch, token, 1), over the sources a distribution."""
        return torch.stack([self.query(self.norm(v)) for v in sources]).softmax(0)


class AttnResBlock(nn.Module):
    def __init__(self, size: Size, block: int, sublayers: int) -> None:
        """``sublayers``: how many are summed up into one source."""
        super().__init__()
        self.done, self.sublayers = 2 * block, sublayers
        self.attention_norm = norm(size)
        self.attention = Attention(size)
        self.attention_mix = DepthMix(size)
        self.ffn_norm = norm(size)
        self.ffn = FeedForward(size)
        self.ffn_mix = DepthMix(size)

    def forward(self, state: State) -> State:
        h, sources = state
        sources = self.add(sources, self.attention(self.attention_norm(h)), self.done)
        h = self.attention_mix(sources)
        sources = self.add(sources, self.ffn(self.ffn_norm(h)), self.done + 1)
        return self.ffn_mix(sources), sources

    def add(self, sources: list[Tensor], v: Tensor, done: int) -> list[Tensor]:
        """The sources with one output more: a new one, or added to the unfinished last sum."""
        if done % self.sublayers == 0:
            return [*sources, v]
        return [*sources[:-1], sources[-1] + v]


class Enter(nn.Module):
    def forward(self, x: Tensor) -> State:
        return x, [x]


class Leave(nn.Module):
    def forward(self, state: State) -> Tensor:
        return state[0]


def build(size: Size, sublayers: int = 1) -> LanguageModel:
    blocks = [AttnResBlock(size, i, sublayers) for i in range(size.blocks)]
    model = LanguageModel(size, blocks, enter=Enter(), leave=Leave())
    for module in model.modules():
        if isinstance(module, DepthMix):
            nn.init.zeros_(module.query.weight)
    return model


def build_block(size: Size) -> LanguageModel:
    """About eight sums, as the paper advises."""
    return build(size, max(2, 2 * size.blocks // 8))
