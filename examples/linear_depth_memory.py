"""Linear depth memory: OUR READING of an abstract ("Depth Memory"); the paper's code is not public.

Three streams run through the depth: the residual, a linear memory M of what earlier sublayers put out,
and P, the inverse covariance of its keys. A sublayer reads M by a query and its output is written back
under a key, by recursive least squares with forgetting g, per token:
K = P k / (g + k'P k), M <- M + (v - M k) K', P <- (P - K k'P) / g. In float32 whatever the model's type."""

import torch
from torch import Tensor, nn

from examples.language_model import Attention, FeedForward, LanguageModel, Size, norm

KEY = 4  # width of a key
START = 1.0  # P starts as this multiple of the identity

State = tuple[Tensor, Tensor, Tensor]  # stream (b, t, d), memory (b, t, d, KEY), P (b, t, KEY, KEY)


class Memory(nn.Module):
    """Writes a sublayer's output under a key made of it, and reads for the next sublayer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = norm(size)
        self.key = nn.Linear(size.width, KEY, bias=False)
        self.query = nn.Linear(size.width, KEY, bias=False)
        self.forget = nn.Parameter(torch.tensor(4.0))  # sigmoid: 0.98
        self.gate = nn.Parameter(torch.zeros(()))  # what is read is added through it

    def forward(self, added: Tensor, state: State) -> State:
        x, memory, p = state
        memory, p = write(memory, p, self.key(self.norm(added)), added, self.forget.sigmoid())
        read = memory @ self.query(self.norm(x)).float().unsqueeze(-1)
        return x + added + self.gate * read.squeeze(-1).to(x.dtype), memory, p


def write(
    memory: Tensor, p: Tensor, key: Tensor, value: Tensor, forget: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of recursive least squares: (..., d, k), (..., k, k), key (..., k), value (..., d)."""
    key, value = key.float().unsqueeze(-1), value.float().unsqueeze(-1)
    seen = p @ key
    gain = seen / (forget + key.mT @ seen)
    return memory + (value - memory @ key) @ gain.mT, (p - gain @ seen.mT) / forget


class DepthMemoryBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = norm(size)
        self.attention = Attention(size)
        self.attention_memory = Memory(size)
        self.ffn_norm = norm(size)
        self.ffn = FeedForward(size)
        self.ffn_memory = Memory(size)

    def forward(self, state: State) -> State:
        state = self.attention_memory(self.attention(self.attention_norm(state[0])), state)
        out: State = self.ffn_memory(self.ffn(self.ffn_norm(state[0])), state)
        return out


class Enter(nn.Module):
    def forward(self, x: Tensor) -> State:
        memory = x.new_zeros(*x.shape, KEY, dtype=torch.float32)
        p = START * torch.eye(KEY, device=x.device)
        return x, memory, p.expand(*x.shape[:-1], KEY, KEY)


class Leave(nn.Module):
    def forward(self, state: State) -> Tensor:
        return state[0]


def build(size: Size) -> LanguageModel:
    blocks = (DepthMemoryBlock(size) for _ in range(size.blocks))
    return LanguageModel(size, blocks, enter=Enter(), leave=Leave())
