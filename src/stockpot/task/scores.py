"""What an evaluation found, with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from stockpot.errors import TaskError, describe


@dataclass(frozen=True, eq=False)
class Scores:
    """Per-sample scores in evaluation order; higher is better.

    `batches` holds the batch sizes when the score is known per batch only (a batch mean repeated for its
    samples). Such samples are not independent, and the intervals are then computed from batches.
    """

    values: Tensor  # (n,) float64
    loss: float = math.nan
    complete: bool = True
    batches: tuple[int, ...] | None = None

    @property
    def n(self) -> int:
        return self.values.numel()

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def standard_error(self) -> float:
        """Of the mean; infinite when there is one independent score only."""
        return _standard_error(self.values, self.batches)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Wilson's interval for scores of 0 and 1, otherwise the normal one."""
        z, mean = _quantile(confidence), self.mean
        if self.batches is None and bool(((self.values == 0) | (self.values == 1)).all()):
            n = self.n
            centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
            half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
            return max(centre - half, 0.0), min(centre + half, 1.0)
        half = z * self.standard_error
        return mean - half, mean + half

    def difference(self, other: Scores) -> tuple[float, float, float]:
        """Mean of self minus other with its 95 % interval, paired sample by sample."""
        if self.n != other.n:
            raise TaskError(
                describe(
                    "paired difference of scores",
                    expected=f"scores of the same {self.n} samples",
                    found=f"{other.n} in the other",
                    fix="compare complete evaluations on the same data in the same order",
                )
            )
        delta = self.values - other.values  # (n,)
        mean = float(delta.mean())
        half = _quantile(0.95) * _standard_error(delta, self.batches or other.batches)
        return mean, mean - half, mean + half


def _quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise TaskError(
            describe(
                "confidence of an interval",
                expected="a number between 0 and 1",
                found=str(confidence),
                fix="use 0.95 for a 95 % interval",
            )
        )
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _standard_error(values: Tensor, batches: tuple[int, ...] | None) -> float:
    deviations = values - values.mean()  # (n,)
    if batches is not None:
        deviations = torch.stack([part.sum() for part in torch.split(deviations, list(batches))])  # (m,)
    m = deviations.numel()
    if m < 2:
        return math.inf
    # Cluster-robust; with clusters of one sample this is the familiar std / sqrt(n).
    return math.sqrt(float(deviations.square().sum()) * m / (m - 1)) / values.numel()
