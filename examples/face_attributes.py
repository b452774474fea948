"""Two cascaded CNNs that read attributes off faces in generated images, in three phases of one run.

python -m examples.face_attributes

After Liu et al. (arXiv 1411.7766): LNet finds the face by a response map, ANet reads attributes off
the crop that LNet chooses, its last layers with filters that are shared only within a cell of the face.
First LNet is trained, then ANet on true crops, then both together through the crop. Writes
demo/faces.h5 and demo/faces.report.html, in about a minute.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

import dynscope
from examples.packaged import draw

SIDE, CROP, CELLS = 48, 24, 3
ATTRIBUTES = ("smiling", "glasses", "beard")
PHASES = ("the localizer", "the attributes, on true crops", "both, through the crop")


class Faces(NamedTuple):
    images: Tensor  # (n, 1, SIDE, SIDE)
    centres: Tensor  # (n, 2), x and y from -1 to 1
    attributes: Tensor  # (n, attribute), 0 or 1


def faces(n: int, random: torch.Generator) -> Faces:
    """Ellipses with eyes and a mouth at random places, over clutter; attributes change the drawing."""
    axis = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    centres = torch.rand(n, 2, generator=random) - 0.5
    attributes = (torch.rand(n, len(ATTRIBUTES), generator=random) < 0.5).float()
    smiling, glasses, beard = (a.view(-1, 1, 1) for a in attributes.T)
    u, v = x - centres[:, :1, None], y - centres[:, 1:, None]

    def blob(cx: float, cy: float, size: float) -> Tensor:
        return torch.exp(-((u - cx) ** 2 + (v - cy) ** 2) / size**2)

    face = torch.sigmoid(40 * (0.16 - u**2 / 0.8 - v**2))
    eyes = blob(-0.14, -0.12, 0.06) + blob(0.14, -0.12, 0.06)
    bridge = torch.exp(-(((v + 0.12) / 0.03) ** 2)) * (u.abs() < 0.22)
    mouth = torch.exp(-(((v - 0.16 + (smiling - 0.5) * 3 * (u**2 - 0.01)) / 0.03) ** 2))
    chin = blob(0, 0.3, 0.12)
    drawn = (
        face - 1.2 * eyes - 0.8 * glasses * bridge - mouth * (u.abs() < 0.15) - 0.7 * beard * chin
    )
    clutter = functional.interpolate(
        torch.randn(n, 1, 8, 8, generator=random), SIDE, mode="bilinear"
    )
    return Faces(drawn.unsqueeze(1) + 0.5 * clutter, centres, attributes)


class LocallyShared(nn.Module):
    """A convolution whose filters are shared within each of CELLS x CELLS cells only."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(inputs, outputs, 3, padding=1) for _ in range(CELLS**2))
        self.cells = nn.ModuleList(convolutions)

    def forward(self, x: Tensor) -> Tensor:
        rows = [row.chunk(CELLS, dim=3) for row in x.chunk(CELLS, dim=2)]
        cells = iter(self.cells)
        done = [torch.cat([next(cells)(cell) for cell in row], 3) for row in rows]
        return torch.cat(done, 2)


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


class LNet(nn.Module):
    """Finds the face: images to a response map and its centre of mass, x and y from -1 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            convolution(1, 16), convolution(16, 32), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()
        )
        self.response = nn.Conv2d(32, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        response = self.response(self.layers(images)).squeeze(1)
        weights = response.flatten(1).softmax(1).view_as(response)
        axis = torch.linspace(-1, 1, response.shape[-1])
        return torch.stack([(weights.sum(1) * axis).sum(1), (weights.sum(2) * axis).sum(1)], 1)


class ANet(nn.Module):
    """Reads the attributes off a crop: (n, 1, CROP, CROP) to logits (n, attribute)."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(convolution(1, 16), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
        self.local = nn.Sequential(LocallyShared(32, 16), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(16 * (CROP // 4) ** 2, 64)
        self.head = nn.Linear(64, len(ATTRIBUTES))

    def forward(self, crops: Tensor) -> Tensor:
        features = self.local(self.shared(crops)).flatten(1)
        out: Tensor = self.head(functional.relu(self.fc(features)))
        return out


class Cascade(nn.Module):
    """LNet, the crop that it chooses, ANet. ``at``: where to crop instead."""

    def __init__(self) -> None:
        super().__init__()
        self.lnet = LNet()
        self.anet = ANet()

    def forward(self, images: Tensor, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        centres = self.lnet(images)
        axis = torch.linspace(-0.5, 0.5, CROP)
        window = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
        grid = window + (centres if at is None else at)[:, None, None, :]
        crops = functional.grid_sample(images, grid, align_corners=True)
        return self.anet(crops), centres


def phases(model: Cascade, steps: int) -> Iterator[int]:
    """The phase of each step; what a phase does not train has no gradient in it."""
    for phase in range(len(PHASES)):
        for network, trained in ((model.lnet, phase != 1), (model.anet, phase != 0)):
            network.requires_grad_(trained)
        for _ in range(steps // len(PHASES)):
            yield phase


def train(path: Path, steps: int = 300) -> float:
    """Train in three phases and record into ``path``; returns the share of attributes read right."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    model, told = Cascade(), -1
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with dynscope.attach(
        model,
        path,
        optimizer=optimizer,
        every=5,
        blocks=(),
        name="faces",
        overwrite=True,
    ) as scope:
        for phase in track(phases(model, steps), "Training", total=steps // 3 * 3):
            if phase != told:
                scope.tell("phase", f"training {PHASES[phase]}")
                told = phase
            images, centres, attributes = faces(32, random)
            logits, found = model(images, centres if phase == 1 else None)
            place = functional.mse_loss(found, centres)
            read = functional.binary_cross_entropy_with_logits(logits, attributes)
            loss = (place, read, place + read)[phase]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scope.log(loss=loss, localization_error=place, attribute_loss=read)
    model.eval()
    with torch.no_grad():
        images, _, attributes = faces(500, torch.Generator().manual_seed(1))
        return float(((model(images)[0] > 0) == (attributes > 0.5)).float().mean())


def main(
    path: Annotated[Path, typer.Argument(help="the run file to write")] = Path("demo/faces.h5"),
    steps: int = 300,
) -> None:
    """Train two cascaded CNNs in three phases, recorded with dynscope."""
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{train(path, steps):.0%} of the attributes of unseen faces are read right")
    draw(path)


if __name__ == "__main__":
    typer.run(main)
