"""A small network for the price of a diamond, and the data it is judged on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from stockpot import Pool, Task

DATA = Path(__file__).parents[1] / "data" / "regression"
METRIC, UNIT = "R2", None  # intervals take a diamond as the unit
SECOND = "held_ideal"
START = "pretrained.safetensors"  # the model before fine-tuning
FITTED = 2000  # diamonds that a seed draws from `fit`
MEAN = 7.64  # of the logarithms of the prices of `ideal`


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """Four blocks of width 96, 152,000 parameters."""

    def __init__(self, columns: int = 26, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(columns, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:  # (n, columns) -> (n,)
        return self.head(self.norm(self.blocks(self.first(x)))).squeeze(1) + MEAN


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of each sample, (n,)."""
    return (model(batch[0]) - batch[1]).square()


def read(part: str) -> tuple[Tensor, Tensor]:
    found = np.load(DATA / "tables" / f"{part}.npz")
    return torch.from_numpy(found["x"]), torch.from_numpy(found["y"])


def batch(values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return values


def build() -> Network:
    return Network()


def task(seed: int, reports: Iterable[str]) -> Task:
    """What is fitted on is another draw for every seed."""
    x, y = read("fit")
    drawn = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:FITTED]
    sets = {part: read(part) for part in reports}
    return Task(build(), (x[drawn], y[drawn]), sets, loss=squared, metric="r2", device="cpu", batch_size=4000)


def pool() -> Pool:
    return Pool.open(DATA / "pool")


def others(pool: str, device: torch.device) -> Iterable[tuple[str, dict[str, Tensor], float]]:  # noqa: ARG001
    """Soups that somebody else makes: none."""
    return ()
