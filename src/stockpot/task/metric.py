"""A metric is statistics of each sample and a reduction of all of them to one number."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stockpot import words
from stockpot.errors import TaskError
from stockpot.events import Listener
from stockpot.task.batches import users_code

Counted = Callable[[Tensor], Tensor]  # counts (B, N), how often each sample was drawn -> values (B,)
Reduction = Callable[[Tensor], Counted]  # of a table (N, m)

HOW_TO = (
    "return one number per sample from metric(outputs, batch). What is no mean over samples (F1, AUC) is a Metric:"
    ' Metric("name", statistics=lambda outputs, batch: ..., reduce=lambda table: ...), statistics (n, m) for each'
    " sample and one number from the table (N, m) of all samples"
)


def mean(table: Tensor) -> float:
    return float(table[:, 0].mean())


def _ratio(scale: float, table: Tensor) -> float:
    total, weight = table.sum(0).tolist()
    return scale * total / weight if weight else math.nan


def _once(counted: Reduction, table: Tensor) -> float:
    """The value of all samples, each drawn once."""
    every = torch.ones(1, len(table), dtype=table.dtype)
    return math.nan if bool(table.isnan().any()) else float(counted(table)(every))


def of_sums(value: Callable[..., Tensor], columns: Callable[[Tensor], Sequence[Tensor]] | int = 2) -> Reduction:
    """A value of sums over the samples: of columns (N, D), or so many parts of the table; its mean over D outputs."""

    def counted(table: Tensor) -> Counted:
        parts = table.chunk(columns, dim=1) if isinstance(columns, int) else columns(table)
        every = torch.cat([*parts], dim=1)
        return lambda counts: value(*(counts @ every).chunk(len(parts), dim=1)).mean(1)  # of (B, D) each

    return counted


def mean_over(seen: Tensor, shares: Tensor) -> Tensor:
    """Of (B, C), over the classes that are seen; (B, 1)."""
    return torch.where(seen, shares, 0).sum(1, keepdim=True) / seen.sum(1, keepdim=True)


@dataclass(frozen=True)
class Metric:
    """How good outputs are: `statistics(outputs, batch)` for each sample, `reduce(table)` over all samples.

    Higher is better. A mean has one statistic, the sample's score; its `ceiling`, the largest score of one sample,
    lets greedy stop an evaluation early. A `ratio` has two, and is that number times the sum of the first over the sum
    of the second, such as right tokens over tokens. With `tokens`, statistics are given logits (n, T, C) and a batch
    with labels (n, T) of the same positions, after the shift by one of causal models. With `calls_model` they are given
    the live model in place of its outputs. `counted(table)` gives a function of counts (B, N), how often each sample
    was drawn, to the B values of those draws: it makes intervals faster than reducing a thousand drawn tables, and
    stands for `reduce` where that is left out.
    """

    name: str
    statistics: Callable[[Any, Any], Tensor]  # -> (n, m)
    reduce: Callable[[Tensor], float] = mean  # (N, m) float64 on the host
    is_mean: bool = False
    ceiling: float | None = None
    percent: bool = False
    counted: Reduction | None = None
    ratio: float | None = None
    tokens: bool = False
    calls_model: bool = False

    def __post_init__(self) -> None:
        # A frozen dataclass is filled in by its class's setter.
        if self.ratio is not None:
            object.__setattr__(self, "reduce", partial(_ratio, self.ratio))
        elif self.counted is not None and self.reduce is mean:
            object.__setattr__(self, "reduce", partial(_once, self.counted))
        if (self.is_mean and self.reduce is not mean) or (self.ceiling is not None and not self.is_mean):
            raise TaskError.of(
                f"Metric {self.name!r}",
                expected="is_mean=True, and a ceiling, for the mean of one score per sample only",
                found="a reduction of its own" if self.reduce is not mean else "a ceiling without is_mean",
                fix="leave out is_mean and ceiling, or leave out reduce and return one score per sample",
            )

    @property
    def unit(self) -> str:
        """What stands behind scores: "%", "nats", "bits" or nothing."""
        return "%" if self.percent else {"nats_per_token": "nats", "bits_per_byte": "bits"}.get(self.name, "")

    @property
    def shown(self) -> words.Metric:
        """How its scores are written."""
        return words.Metric(self.name, self.unit)

    def of_batch(self, outputs: Any, batch: Any, n: int) -> Tensor:
        """The statistics (n, m) of a batch, checked; (n,) is one statistic."""
        with users_code(f"metric {self.name}", self.statistics, outputs, batch):
            found = torch.as_tensor(self.statistics(outputs, batch)).detach()
        if found.shape == (n,) or (n == 1 and found.ndim == 0):
            found = found.reshape(n, 1)
        columns = 1 if self.is_mean else 2 if self.ratio is not None else max(1, found.shape[-1] if found.ndim else 0)
        if found.ndim != 2 or found.shape != (n, columns):
            shown = "one number for the whole batch" if found.numel() == 1 else f"shape {tuple(found.shape)}"
            raise TaskError.of("metric", expected=f"one score per sample, shape ({n},)", found=shown, fix=HOW_TO)
        return found

    def spoilt_by(self, table: Tensor) -> bool:
        """Whether NaN in a few statistics leaves no value; a reduction of the user's own may pass it over."""
        if self.is_mean or self.ratio is not None:
            return True
        try:
            return math.isnan(float(self.reduce(table.double().cpu())))
        except Exception:  # of so few samples it may have none anyway
            return False

    def of_draws(self, table: Tensor) -> Counted:
        """The value of each draw of samples; NaN where a draw lacks what the metric needs, such as a class."""
        if self.counted is not None:
            return self.counted(table)

        def value(count: Tensor) -> float:
            try:
                return float(self.reduce(table.repeat_interleave(count, dim=0)))
            except Exception:
                return math.nan

        def values(counts: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.tensor([value(count) for count in counts.long()], dtype=torch.float64)

        return values


class Benchmark(ABC):
    """Report data that asks and judges the model in its own way, such as a task of lm-evaluation-harness.

    Nothing is learned on it. The model is in evaluation mode, without gradients, whenever it is handed over.
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
