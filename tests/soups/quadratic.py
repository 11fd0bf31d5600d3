"""A task whose loss is quadratic in the weights, so that the best soup is known in closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.pool import Pool
from stockpot.task import Task
from zoo import write

DIMENSION = 24


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    residual: Tensor = model(x).squeeze(-1) - y
    return 0.5 * residual.square()


class Quadratic:
    """Least squares with a linear model; K random models, coefficients of the whole model (G = 1)."""

    def __init__(self, folder: Path, models: int, samples: int = 64, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.x = random(samples, DIMENSION)
        self.y = self.x @ random(DIMENSION) + 0.1 * random(samples)
        self.models = random(DIMENSION) + 0.3 * random(models, DIMENSION)  # (K, D)
        self.pool: Pool = write(folder, [{"weight": w[None].clone()} for w in self.models])
        self.task = Task(
            nn.Linear(DIMENSION, 1, bias=False).double(), (self.x, self.y), loss=squared_error, metric="loss"
        )
        mean = self.models.mean(dim=0)
        self.directions = self.models - mean  # (K, D)
        A = self.x @ self.directions.T  # (n, K): predictions move by A a
        self.hessian = A.T @ A / samples  # (K, K)
        self.slope = A.T @ (self.x @ mean - self.y) / samples  # (K,)
        self.sample_slopes = A  # times the residual: gradient of one sample

    @property
    def smoothness(self) -> float:
        """beta of the paper's theorem."""
        return float(torch.linalg.eigvalsh(self.hessian).max())

    def loss(self, a: Tensor) -> float:
        theta = self.models.mean(dim=0) + a @ self.directions
        return float(0.5 * (self.x @ theta - self.y).square().mean())

    def gradient(self, a: Tensor) -> Tensor:
        """d loss / d a. (K,)"""
        return self.hessian @ a + self.slope

    def variance(self, a: Tensor) -> float:
        """sigma^2 at a: how far one sample's gradient is from the mean's, squared, on average."""
        theta = self.models.mean(dim=0) + a @ self.directions
        own = self.sample_slopes * (self.x @ theta - self.y)[:, None]  # (n, K)
        return float((own - own.mean(dim=0)).square().sum(dim=1).mean())

    def optimum(self) -> Tensor:
        """The best mixing weights on the hyperplane. (K,)"""
        a: Tensor = torch.linalg.lstsq(self.hessian, -self.slope).solution
        return 1 / len(self.models) + a - a.mean()
