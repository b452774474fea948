"""Text for byte-level language models: a token is a byte, so that any file will do."""

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import typer
from torch import Tensor

SHORTEST = 10_000  # so that both parts are longer than any context


@dataclass(frozen=True)
class Text:
    """Tokens (int64, one axis) of the first nine tenths of a text, and of the rest."""

    train: Tensor
    validation: Tensor

    @classmethod
    def read(cls, path: Path | None = None) -> "Text":
        """Of a file, or of the language reference (English, 0.5 MB) that every Python ships."""
        raw = path.read_bytes() if path else "\n".join(topics.values()).encode()
        if len(raw) < SHORTEST:
            raise typer.BadParameter(f"{path} is too short: {len(raw)} bytes, needs {SHORTEST:,}")
        tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
        cut = len(tokens) * 9 // 10
        return cls(tokens[:cut], tokens[cut:])


def batch(
    tokens: Tensor, size: int, context: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random windows: inputs and the tokens that follow them, both (size, context)."""
    starts = torch.randint(len(tokens) - context, (size, 1), generator=random)
    windows = tokens[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]
