"""A CLIP-like vision transformer in which only the gains and biases of the norms learn.

python -m examples.norm_tuning

As in deepfake detection by tuning CLIP's norms (arXiv 2503.19683): everything else is frozen, the class
token is brought to length 1 and compared with two fixed directions; cross-entropy plus a term that
spreads the two classes. The fakes are generated images with the checkerboard that upsampling leaves.
Writes demo/norms.h5 and its report, in about a minute.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

import dynscope
from examples.packaged import draw, quiet

SIDE, PATCH, WIDTH = 32, 8, 64
TEMPERATURE = 0.1


def images(n: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Smooth random images (n, 3, SIDE, SIDE), half of them with a faint checkerboard; labels (n,)."""
    coarse = torch.randn(n, 3, 8, 8, generator=random)
    smooth = functional.interpolate(coarse, SIDE, mode="bicubic")
    labels = torch.randint(2, (n,), generator=random)
    axis = torch.arange(SIDE)
    board = ((axis[:, None] + axis) % 2 * 2 - 1).float()
    noise = 0.2 * torch.randn(smooth.shape, generator=random)
    return smooth + noise + 0.3 * labels.view(-1, 1, 1, 1) * board, labels


class Detector(nn.Module):
    """Images to logits (n, 2): cosine of the class token with two fixed directions."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import CLIPVisionConfig, CLIPVisionModel

        quiet()
        config = CLIPVisionConfig(
            hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=6,
            num_attention_heads=4, image_size=SIDE, patch_size=PATCH, initializer_factor=4.0,
        )  # fmt: skip
        self.tower = CLIPVisionModel(config).requires_grad_(False)
        for name, parameter in self.tower.named_parameters():
            parameter.requires_grad_("norm" in name)
        self.directions: Tensor
        self.register_buffer("directions", nn.init.orthogonal_(torch.empty(2, WIDTH)))

    def features(self, pixels: Tensor) -> Tensor:
        """Unit vectors (n, width)."""
        return functional.normalize(self.tower(pixels).pooler_output, dim=-1)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(pixels)
        return features @ self.directions.T / TEMPERATURE, features


def uniformity(features: Tensor) -> Tensor:
    """Logarithm of the mean Gaussian potential of all pairs (Wang and Isola, arXiv 2005.10242)."""
    return torch.pdist(features).square().mul(-2).exp().mean().log()


def train(path: Path, steps: int = 200) -> float:
    """Train and record into ``path``; returns the accuracy on images never seen."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    model = Detector()
    tuned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(tuned, lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with dynscope.attach(
        model, path, optimizer=optimizer, every=5, name="norm tuning", overwrite=True
    ) as scope:
        for _ in track(range(steps), "Training"):
            pixels, labels = images(64, random)
            logits, features = model(pixels)
            entropy, spread = functional.cross_entropy(logits, labels), uniformity(features)
            optimizer.zero_grad()
            (entropy + 0.05 * spread).backward()
            optimizer.step()
            schedule.step()
            scope.log(loss=entropy, uniformity=spread)
    model.eval()
    with torch.no_grad():
        pixels, labels = images(400, torch.Generator().manual_seed(1))
        return float((model(pixels)[0].argmax(-1) == labels).float().mean())


def main(
    path: Annotated[Path, typer.Argument(help="the run file to write")] = Path("demo/norms.h5"),
    steps: int = 200,
) -> None:
    """Tune the norms of a small vision transformer, recorded with dynscope."""
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{train(path, steps):.0%} of unseen images are told right")
    draw(path)


if __name__ == "__main__":
    typer.run(main)
