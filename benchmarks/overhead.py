"""What recording costs per training step: `make bench`, or python -m benchmarks.overhead --help.

Model: a 12-layer Pre-LN GPT, width 384, 6 heads, vocabulary 4,096 (24.5 M parameters, 88 leaf
modules), batch 8 × 256, AdamW, float32. Method: two equal models step in turn, one of them
recorded; a row is the median and the quartiles of the pairwise ratios. The first row compares two
plain models: what it is away from 1 is noise. Beside it stands what the recorder itself counted, the
median of ``clock/cost`` over the plain step: less noisy, blind to what it slows down elsewhere.
Other tools stand below where they are installed (benchmarks/peers.py says how).
"""

import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

import dynscope
from benchmarks.peers import Peer, installed

Step = Callable[[], None]
# How to attach; another tool to use; or None, which leaves the model alone.
Config = dict[str, Any] | type[Peer] | None


def never(step: int) -> bool:
    return False


STANDARD: dict[str, Any] = {
    "sites": "blocks",
    "metrics": "standard",
    "every": 1,
    "weights_every": never,
}
BLOCKS = "blocks, standard, every step"
ROWS: dict[str, Config] = {
    "nothing attached (A/A control)": None,
    BLOCKS: STANDARD,
    "leaves, standard, every step": STANDARD | {"sites": "leaves"},
    "blocks, light, every step": STANDARD | {"metrics": "light"},
    "blocks, full, every step": STANDARD | {"metrics": "full"},
    "weights alone, every step": STANDARD | {"every": never, "weights_every": 1},
}


@dataclass(frozen=True)
class Shape:
    layers: int = 12
    width: int = 384
    heads: int = 6
    vocabulary: int = 4096
    batch: int = 8
    tokens: int = 256


TOY = Shape(layers=2, width=16, heads=2, vocabulary=64, batch=2, tokens=8)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.act(self.c_fc(x)))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = MLP(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(shape.tokens, shape.width)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class Training:
    """A model that takes training steps on one fixed batch, recorded as ``config`` says."""

    def __init__(self, shape: Shape, config: Config, folder: str) -> None:
        torch.manual_seed(0)
        self.model = GPT(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(shape.vocabulary, (shape.batch, shape.tokens))
        self.scope, self.peer = None, Peer(self.model, self.optimizer)
        if isinstance(config, type):
            self.peer = config(self.model, self.optimizer)
        elif config is not None:
            self.path = Path(folder) / "run.h5"
            self.scope = dynscope.attach(
                self.model, self.path, optimizer=self.optimizer, summary=False, **config
            )

    def step(self) -> None:
        self.peer.begin()
        logits = self.model(self.tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.peer.after_backward(loss)
        self.optimizer.step()
        self.peer.end(loss)

    def close(self) -> None:
        self.peer.close()
        if self.scope:
            self.scope.close()


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Ratio:
    """Step time with recording over step time without: quartiles, and the plain step's time."""

    low: float
    median: float
    high: float
    plain_seconds: float
    own_clock: float = float("nan")  # 1 + the seconds that the recorder counted, over a plain step


def compare(shape: Shape, config: Config, rounds: int, name: str) -> Ratio:
    """The step of a recorded model against that of an equal plain one."""
    with tempfile.TemporaryDirectory() as folder:
        plain, recorded = Training(shape, None, folder), Training(shape, config, folder)
        ratio = alternate(plain.step, recorded.step, rounds, name)
        recorded.close()
        if recorded.scope is None or not len(cost := dynscope.load(recorded.path)["clock/cost"]):
            return ratio
        return replace(ratio, own_clock=1 + float(cost.median()) / ratio.plain_seconds)


def alternate(plain: Step, recorded: Step, rounds: int, name: str) -> Ratio:
    """Two equal models step in turn, the order swapping each round; three rounds warm up."""
    pairs = []
    bar = track(range(rounds + 3), name, console=Console(stderr=True), transient=True)
    for turn in bar:
        order = (plain, recorded) if turn % 2 else (recorded, plain)
        times = {step: seconds(step) for step in order}
        pairs.append((times[plain], times[recorded]))
    pairs = pairs[3:]
    low, median, high = statistics.quantiles([with_ / without for without, with_ in pairs], n=4)
    return Ratio(low, median, high, statistics.median(without for without, _ in pairs))


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def idle_seconds_per_hook(links: int = 500, repeats: int = 200) -> float:
    """Time of one unarmed hook, the framework's way of calling it included.

    The difference between two chains of tiny layers, the hooks of one of them asleep.
    """
    chains = [nn.Sequential(*(nn.Linear(1, 1) for _ in range(links))) for _ in range(2)]
    x = torch.zeros(1, 1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "run.h5"
        scope = dynscope.attach(
            chains[1], path, sites="leaves", every=never, weights_every=never, summary=False
        )
        gaps = [
            -seconds(lambda: chains[0](x)) + seconds(lambda: chains[1](x)) for _ in range(repeats)
        ]
        hooks = hooks_on(chains[1])
        scope.close()
    return statistics.median(gaps) / hooks


def hooks_of(shape: Shape, config: Config) -> int:
    with tempfile.TemporaryDirectory() as folder:
        training = Training(shape, config, folder)
        hooks = hooks_on(training.model)
        training.close()
    return hooks


def peak_mib(shape: Shape, config: Config) -> float:
    """Peak resident memory of a process of its own that takes four steps."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_here, (shape, config))


def _peak_here(shape: Shape, config: Config) -> float:
    with tempfile.TemporaryDirectory() as folder:
        training = Training(shape, config, folder)
        for _ in range(4):
            training.step()
        training.close()
    # Not getrusage: a child's maximum there begins at its parent's size.
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 2**10


def table(shape: Shape, rows: dict[str, Config], rounds: int) -> str:
    """The measured rows as markdown."""
    lines = [
        "| recorded | ratio | quartiles | by its own clock | peak memory |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, config in rows.items():
        ratio = compare(shape, config, rounds, name)
        memory = peak_mib(shape, config)
        spread = f"{ratio.low:.3f} to {ratio.high:.3f}"
        own = "" if math.isnan(ratio.own_clock) else f"{ratio.own_clock:.3f}"
        lines.append(f"| {name} | {ratio.median:.3f} | {spread} | {own} | {memory:,.0f} MiB |")
        if name == BLOCKS:
            hooks = hooks_of(shape, config)
            idle = idle_seconds_per_hook() * hooks / ratio.plain_seconds
            tenth = 1 + (ratio.median - 1 + 9 * idle) / 10
            lines.append(f"| the same every 10th step (computed from it) | {tenth:.4f} | | | |")
            lines.append(f"| idle: {hooks} hooks that do not record | {1 + idle:.5f} | | | |")
    lines.append(f"\nA plain step takes {ratio.plain_seconds:.3f} s.")
    return "\n".join(lines)


def main(rounds: int = 30, sites: str = "", metrics: str = "", quick: bool = False) -> None:
    """Measure every row, or the one that --sites and --metrics name.

    --quick takes three rounds of a toy model: it shows that the script works and measures nothing.
    """
    rows = ROWS | installed()
    if sites or metrics:
        chosen = {"sites": sites or "blocks", "metrics": metrics or "standard"}
        control = next(iter(ROWS))
        name = f"{chosen['sites']}, {chosen['metrics']}, every step"
        rows = {control: None, name: STANDARD | chosen}
    shape, rounds = (TOY, 3) if quick else (Shape(), rounds)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds\n")
    print(table(shape, rows, rounds))


if __name__ == "__main__":
    typer.run(main)
