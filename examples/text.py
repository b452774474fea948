"""What the small language models learn: text as bytes, or a source whose entropy is known."""

import math
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import typer
from scipy.special import xlogy
from torch import Tensor

SHORTEST = 10_000  # so that both parts are longer than any context


@dataclass(frozen=True)
class Text:
    """Tokens (int64, one axis) of the first nine tenths of a text, and of the rest.

    ``entropy_rate``: nats per token that no model can do without, where that is known.
    """

    train: Tensor
    validation: Tensor
    entropy_rate: float = math.nan

    @classmethod
    def of(cls, data: str) -> "Text":
        """``"docs"``, ``"markov"``, or the path of a text file."""
        if data == "markov":
            return cls.markov()
        return cls.read(None if data == "docs" else Path(data))

    @classmethod
    def read(cls, path: Path | None = None) -> "Text":
        """Of a file, or of the language reference (English, 0.5 MB) that every Python ships.

        A token is a byte, so that any file will do.
        """
        try:
            raw = path.read_bytes() if path else "\n".join(topics.values()).encode()
        except OSError as error:
            raise typer.BadParameter(f"{path}: {error.strerror}") from None
        if len(raw) < SHORTEST:
            raise typer.BadParameter(f"{path} is too short: {len(raw)} bytes, needs {SHORTEST:,}")
        return cls._split(torch.frombuffer(bytearray(raw), dtype=torch.uint8).long())

    @classmethod
    def markov(cls, tokens: int = 500_000, vocabulary: int = 256, seed: int = 0) -> "Text":
        """A chain of which each token's successors are drawn from a Dirichlet distribution (0.1)."""
        random = np.random.default_rng(seed)
        transition = random.dirichlet(np.full(vocabulary, 0.1), vocabulary)
        stationary = np.linalg.matrix_power(transition, 1024)[0]
        entropy = -(stationary[:, None] * xlogy(transition, transition)).sum()
        edges = transition.cumsum(1)
        chain, state = np.empty(tokens, np.int64), 0
        for i, draw in enumerate(random.random(tokens)):
            state = min(int(edges[state].searchsorted(draw)), vocabulary - 1)
            chain[i] = state
        return cls._split(torch.from_numpy(chain), float(entropy))

    @classmethod
    def _split(cls, tokens: Tensor, entropy_rate: float = math.nan) -> "Text":
        cut = len(tokens) * 9 // 10
        return cls(tokens[:cut], tokens[cut:], entropy_rate)


def batch(
    tokens: Tensor, size: int, context: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random windows: inputs and the tokens that follow them, both (size, context)."""
    starts = torch.randint(len(tokens) - context, (size, 1), generator=random)
    windows = tokens[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]
