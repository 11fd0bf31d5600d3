"""A metric is statistics per sample and a reduction of all of them to one number; scores are what it found."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stockpot.errors import TaskError
from stockpot.task import intervals
from stockpot.task.batches import users_code

MetricFunction = Callable[[Any, Any], Any]

HOW_TO = (
    "return one number per sample from metric(outputs, batch). What is no mean over samples (F1, AUC) is a Metric:"
    ' Metric("name", statistics=lambda outputs, batch: ..., reduce=lambda table: ...), statistics (n, m) for each'
    " sample and one number from the table (N, m) of all samples"
)


def mean(table: Tensor) -> float:
    return float(table[:, 0].mean())


@dataclass(frozen=True)
class Metric:
    """How good outputs are: `statistics(outputs, batch)` for each sample, `reduce(table)` over all samples.

    Higher is better. A mean has one statistic, the sample's score; its `ceiling`, the largest score of one sample,
    lets greedy stop an evaluation early. `counted(table)` gives a function of counts (B, N), how often each sample was
    drawn, to the B values of those draws; it only makes intervals faster than reducing a thousand drawn tables.
    """

    name: str
    statistics: Callable[[Any, Any], Tensor]  # -> (n, m)
    reduce: Callable[[Tensor], float] = mean  # (N, m) float64 on the host
    is_mean: bool = False
    ceiling: float | None = None
    percent: bool = False
    counted: Callable[[Tensor], intervals.Counted] | None = None

    def __post_init__(self) -> None:
        if (self.is_mean and self.reduce is not mean) or (self.ceiling is not None and not self.is_mean):
            raise TaskError.of(
                f"Metric {self.name!r}",
                expected="is_mean=True, and a ceiling, for the mean of one score per sample only",
                found="a reduction of its own" if self.reduce is not mean else "a ceiling without is_mean",
                fix="leave out is_mean and ceiling, or leave out reduce and return one score per sample",
            )

    @classmethod
    def of_function(cls, function: MetricFunction) -> Metric:
        """The mean of a plain function's scores, one per sample."""
        return cls("score", function, is_mean=True)

    def of_batch(self, outputs: Any, batch: Any, n: int) -> Tensor:
        """The statistics (n, m) of a batch, checked; (n,) is one statistic."""
        with users_code(f"metric {self.name}", self.statistics):
            found = torch.as_tensor(self.statistics(outputs, batch)).detach()
        if n == 1 and found.ndim == 0:
            found = found[None]
        if found.ndim == 1 and len(found) == n:
            found = found[:, None]
        if found.ndim != 2 or len(found) != n or found.shape[1] == 0 or (self.is_mean and found.shape[1] > 1):
            shown = "one number for the whole batch" if found.numel() == 1 else f"shape {tuple(found.shape)}"
            raise TaskError.of("metric", expected=f"one score per sample, shape ({n},)", found=shown, fix=HOW_TO)
        return found

    def _counted(self, table: Tensor) -> intervals.Counted:
        if self.counted is not None:
            return self.counted(table)

        def value(count: Tensor) -> float:
            try:
                return float(self.reduce(table.repeat_interleave(count, dim=0)))
            except Exception:  # a draw may lack what the metric needs, such as a class
                return math.nan

        def values(counts: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.tensor([value(count) for count in counts.long()], dtype=torch.float64)

        return values


@dataclass(frozen=True, eq=False)
class Scores:
    """A metric's statistics of each sample, in evaluation order, and what they come to; higher is better."""

    table: Tensor  # (N, m) float64 on the host
    metric: Metric
    loss: float = math.nan
    complete: bool = True

    @property
    def n(self) -> int:
        return self.table.shape[0]

    @property
    def value(self) -> float:
        """The reduced number; NaN where the metric has none."""
        with users_code(f"reduction of metric {self.metric.name}", self.metric.reduce):
            return float(self.metric.reduce(self.table))

    def rows(self, indices: Tensor) -> Scores:
        """Of some samples only, in this order; the loss is that of all samples and is left out."""
        return replace(self, table=self.table[indices], loss=math.nan)

    @property
    def standard_error(self) -> float:
        """Of a mean; infinite when there is one sample only."""
        if not self.metric.is_mean:
            raise TaskError.of(
                f"standard error of {self.metric.name}",
                expected="a mean over samples",
                found="a metric that is none",
                fix="use interval() or difference(), which resample",
            )
        return intervals.standard_error(self.table[:, 0])

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Wilson's for scores of 0 and 1, Student's for other means, else from resampled samples."""
        if not self.metric.is_mean:
            return intervals.resampled([self.metric._counted], [self.table], confidence)
        value = self.value
        if self._right_or_wrong:
            return intervals.wilson(value, self.n, confidence)
        half = intervals.student(confidence, self.n - 1) * self.standard_error
        return value - half, value + half

    def difference(self, other: Scores, confidence: float = 0.95) -> tuple[float, float, float]:
        """Value of self minus other with its interval, paired sample by sample.

        Bonett and Price's for scores of 0 and 1, Student's for other means, else from resampled samples.
        """
        if self.n != other.n or self.metric.name != other.metric.name:
            raise TaskError.of(
                "paired difference of scores",
                expected=f"{self.metric.name} of the same {self.n} samples",
                found=f"{other.metric.name} of {other.n} in the other",
                fix="compare complete evaluations on the same data in the same order",
            )
        if not self.metric.is_mean:
            return self._resampled_difference(other, confidence)
        delta = self.table[:, 0] - other.table[:, 0]  # (n,)
        value = float(delta.mean())
        if self._right_or_wrong and other._right_or_wrong:
            better, worse = int((delta > 0).sum()), int((delta < 0).sum())
            return value, *intervals.bonett_price(better, worse, self.n, confidence)
        half = intervals.student(confidence, self.n - 1) * intervals.standard_error(delta)
        return value, value - half, value + half

    def _resampled_difference(self, other: Scores, confidence: float) -> tuple[float, float, float]:
        both, tables = (self.metric._counted, other.metric._counted), (self.table, other.table)
        low, high = intervals.resampled(both, tables, confidence)
        # However they fall, so few samples that differ may all be on one side by chance.
        differ = int((self.table != other.table).any(dim=1).sum()) if self.table.shape == other.table.shape else self.n
        if 2.0 ** (1 - differ) > 1 - confidence:
            low, high = min(low, 0.0), max(high, 0.0)
        return self.value - other.value, low, high

    @property
    def _right_or_wrong(self) -> bool:
        return bool(((self.table == 0) | (self.table == 1)).all())


def worded(scores: Scores) -> str:
    """A score with its uncertainty, as notes and sentences show it."""
    value, (low, high) = scores.value, scores.interval()
    if scores.metric.percent:
        return f"{100 * value:.2f} % (95 % interval {100 * low:.2f} to {100 * high:.2f}, n = {scores.n})"
    return f"{value:.4g} (95 % interval {low:.4g} to {high:.4g}, n = {scores.n})"
