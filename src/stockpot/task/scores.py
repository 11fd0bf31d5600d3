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
    def value(self) -> float:
        return self.mean

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def standard_error(self) -> float:
        """Of the mean; infinite when there is one independent score only."""
        return _standard_error(self.values, self.batches)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Wilson's interval for scores of 0 and 1, otherwise Student's."""
        mean = self.mean
        if self._right_or_wrong:
            z, n = _normal(confidence), self.n
            centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
            half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
            return max(centre - half, 0.0), min(centre + half, 1.0)
        half = _student(confidence, self._independent - 1) * self.standard_error
        return mean - half, mean + half

    def difference(self, other: Scores, confidence: float = 0.95) -> tuple[float, float, float]:
        """Mean of self minus other with its interval, paired sample by sample.

        For scores of 0 and 1 the interval of Bonett and Price (2012): where few samples make the difference, the
        usual one is too narrow, and of no width when they all point the same way.
        """
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
        if self._right_or_wrong and other._right_or_wrong:
            better, worse = int((delta > 0).sum()), int((delta < 0).sum())
            return mean, *_bonett_price(better, worse, self.n, confidence)
        batches = self.batches or other.batches
        count = self.n if batches is None else len(batches)
        half = _student(confidence, count - 1) * _standard_error(delta, batches)
        return mean, mean - half, mean + half

    @property
    def _right_or_wrong(self) -> bool:
        return self.batches is None and bool(((self.values == 0) | (self.values == 1)).all())

    @property
    def _independent(self) -> int:
        return self.n if self.batches is None else len(self.batches)


def worded(scores: Scores, metric: str) -> str:
    """A score with its uncertainty, as notes and sentences show it."""
    low, high = scores.interval()
    if metric == "accuracy":
        return (
            f"{100 * scores.mean:.2f} % (95 % interval {100 * low:.2f} to {100 * high:.2f}, n = {scores.n})"
        )
    return f"{scores.mean:.4g} (95 % interval {low:.4g} to {high:.4g}, n = {scores.n})"


def _bonett_price(better: int, worse: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a difference of paired proportions, with one sample added on either side.

    It never excludes zero where the exact test (the signs of the samples that differ) would not.
    """
    up, down = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    half = _normal(confidence) * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    low, high = max(up - down - half, -1.0), min(up - down + half, 1.0)
    if low <= 0 <= high or _sign_test(better, worse) <= 1 - confidence:
        return low, high
    return min(low, 0.0), max(high, 0.0)


def _sign_test(better: int, worse: int) -> float:
    """How likely signs so uneven are if both are as likely, two-sided; exact for up to a thousand of them."""
    m = better + worse
    if m > 1000:
        return 0.0  # where the normal interval is as good
    tail = sum(math.comb(m, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / (1 << m))


def _normal(confidence: float) -> float:
    """How many standard errors either side of the mean a normal interval reaches."""
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


def _student(confidence: float, freedom: int) -> float:
    """The same for Student's distribution: wider when there are few scores."""
    z = _normal(confidence)
    if freedom < 1:
        return z  # there is no standard error either
    p = 0.5 + confidence / 2
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    # Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5); at 95 % right within 1 % from three on.
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, start=1))


def _standard_error(values: Tensor, batches: tuple[int, ...] | None) -> float:
    deviations = values - values.mean()  # (n,)
    if batches is not None:
        deviations = torch.stack([part.sum() for part in torch.split(deviations, list(batches))])  # (m,)
    m = deviations.numel()
    if m < 2:
        return math.inf
    # Cluster-robust; with clusters of one sample this is the familiar std / sqrt(n).
    return math.sqrt(float(deviations.square().sum()) * m / (m - 1)) / values.numel()
