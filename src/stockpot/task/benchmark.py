"""Report data that asks and judges the model in its own way, such as a task of lm-evaluation-harness."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from stockpot.events import Listener
from stockpot.task.metric import Metric


class Benchmark(ABC):
    """A set of report data with its own way of calling the model, and its own metric. Nothing is learned on it.

    The model is in evaluation mode, without gradients, whenever it is handed over.
    """

    metric: Metric

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """What tells its samples, and how they are judged, from others."""

    @abstractmethod
    def check(self, model: nn.Module, autocast: torch.dtype | None) -> None:
        """Refuse a model that cannot be asked, before anything long."""

    @abstractmethod
    def table(self, model: nn.Module, autocast: torch.dtype | None, listen: Listener) -> Tensor:
        """The metric's statistics of each sample, always in the same order; (N, m) float64 on the host."""
