"""Small models of the kinds users bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def blobs(n: int = 60, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points (n, 4) around one centre per class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    centres = torch.randn(classes, 4, generator=torch.Generator().manual_seed(99)) * 2
    return centres[y] + torch.randn(n, 4, generator=generator), y


def linear(classes: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, classes))


def normalised(seed: int = 0) -> nn.Module:
    """With everything that behaves differently in training: statistics and dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Encoder(nn.Module):
    """Called with keywords, returns an object, computes its own loss when given labels."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.net = linear()
        self.weight = weight

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.net(inputs)
        if labels is None:
            return Output(logits)
        return Output(logits, self.weight * functional.cross_entropy(logits, labels))


class Plain(nn.Module):
    """Takes no labels; returns whatever `wrap` makes of the logits."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.net = linear()
        self.wrap = wrap

    def forward(self, inputs: Tensor) -> Any:
        return self.wrap(self.net(inputs))
