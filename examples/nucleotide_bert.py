"""A Post-LN BERT that tells coding from non-coding RNA in generated sequences, also with LoRA.

python -m examples.nucleotide_bert [--lora]

Sequences of nucleotides of different lengths, padded; the loss sees the first token only, so that most
positions of the last layer have no gradient. A coding sequence holds an open reading frame: ATG, then
codons without a stop. With --lora the encoder is frozen and low-rank adapters on query and value learn
(Hu et al., arXiv 2106.09685). Writes demo/nucleotides.h5 and its report, in about a minute.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

import dynscope
from examples.packaged import draw, quiet

PAD, CLS, BASES = 0, 1, "ACGT"  # a base's token is its place in BASES plus 2
LONGEST, SHORTEST, CODONS = 72, 48, 14
STOPS = ("TAA", "TAG", "TGA")


def encode(sequence: str) -> Tensor:
    return torch.tensor([CLS, *(BASES.index(base) + 2 for base in sequence)])


def sequence(coding: bool, random: torch.Generator) -> str:
    """Random bases; a coding sequence has a start and fourteen codons of a biased kind in it."""

    def draw(n: int, weights: tuple[float, ...] = (1, 1, 1, 1)) -> str:
        picks = torch.multinomial(
            torch.tensor(weights, dtype=torch.float), n, replacement=True, generator=random
        )
        return "".join(BASES[i] for i in picks)

    length = int(torch.randint(SHORTEST, LONGEST, (), generator=random))
    around = length - 3 * (CODONS + 1)
    before = int(torch.randint(1, around, (), generator=random))
    if not coding:
        return draw(length)
    codons: list[str] = []
    while len(codons) < CODONS:  # third positions prefer G and C, as in many genomes
        codon = draw(2) + draw(1, (1, 9, 9, 1))
        codons += [codon] if codon not in STOPS else []
    return draw(before) + "ATG" + "".join(codons) + draw(around - before)


def batch(n: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (n, longest), attention mask of the same shape, labels (n,)."""
    labels = torch.randint(2, (n,), generator=random)
    rows = [encode(sequence(bool(label), random)) for label in labels]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    return tokens, (tokens != PAD).long(), labels


class LoRA(nn.Module):
    """A frozen linear layer and what low-rank matrices add to it: y = W x + (alpha / r) B A x."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)  # nothing is added at the start
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))
        return out


def build(lora: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    quiet()
    config = BertConfig(
        vocab_size=2 + len(BASES), hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=LONGEST + 1, pad_token_id=PAD,
    )  # fmt: skip
    model: nn.Module = BertForSequenceClassification(config)
    return adapt(model) if lora else model


def adapt(model: nn.Module) -> nn.Module:
    """Freeze the encoder and put adapters on every query and value."""
    model.get_submodule("bert").requires_grad_(False)
    for module in list(model.modules()):
        for name in ("query", "value"):
            if isinstance(child := getattr(module, name, None), nn.Linear):
                setattr(module, name, LoRA(child))
    return model


def train(path: Path, steps: int = 200, lora: bool = False) -> float:
    """Train and record into ``path``; returns the accuracy on sequences never seen."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    model = build(lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3 if lora else 5e-4)
    settings: dict[str, Any] = {"lora": lora}
    with dynscope.attach(
        model, path, optimizer=optimizer, mask="attention_mask", every=5, name="nucleotide BERT",
        config=settings, overwrite=True,
    ) as scope:  # fmt: skip
        for _ in track(range(steps), "Training"):
            tokens, mask, labels = batch(32, random)
            logits = model(input_ids=tokens, attention_mask=mask).logits
            loss = functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.log(loss=loss, tokens=int(mask.sum()))
    model.eval()
    with torch.no_grad():
        tokens, mask, labels = batch(400, torch.Generator().manual_seed(1))
        found = model(input_ids=tokens, attention_mask=mask).logits.argmax(-1)
        return float((found == labels).float().mean())


def main(
    path: Annotated[Path, typer.Argument(help="the run file to write")] = Path(
        "demo/nucleotides.h5"
    ),
    steps: int = 200,
    lora: Annotated[
        bool, typer.Option("--lora", help="freeze the encoder, train adapters")
    ] = False,
) -> None:
    """Train a small BERT on generated nucleotide sequences, recorded with dynscope."""
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{train(path, steps, lora):.0%} of unseen sequences are told right")
    draw(path)


if __name__ == "__main__":
    typer.run(main)
