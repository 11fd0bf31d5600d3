"""What an evaluation found, with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

from stockpot.errors import TaskError, describe
from stockpot.task.metrics import Metric

RESAMPLES = 1000
_PIECE = 250_000  # numbers drawn at a time; more would leave the cache


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
        return float(self.metric.reduce(self.table))

    def rows(self, indices: Tensor) -> Scores:
        """Of some samples only, in this order; the loss is that of all samples and is left out."""
        return replace(self, table=self.table[indices], loss=math.nan)

    @property
    def standard_error(self) -> float:
        """Of a mean; infinite when there is one sample only."""
        if not self.metric.is_mean:
            raise TaskError(
                describe(
                    f"standard error of {self.metric.name}",
                    expected="a mean over samples",
                    found="a metric that is none",
                    fix="use interval() or difference(), which resample",
                )
            )
        return _standard_error(self.table[:, 0])

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Wilson's for scores of 0 and 1, Student's for other means, else from resampled samples."""
        if not self.metric.is_mean:
            return _resampled_interval([self], confidence)
        mean = self.value
        if self._right_or_wrong:
            z, n = _normal(confidence), self.n
            centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
            half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
            return max(centre - half, 0.0), min(centre + half, 1.0)
        half = _student(confidence, self.n - 1) * self.standard_error
        return mean - half, mean + half

    def difference(self, other: Scores, confidence: float = 0.95) -> tuple[float, float, float]:
        """Value of self minus other with its interval, paired sample by sample.

        For scores of 0 and 1 the interval of Bonett and Price (2012): where few samples make the difference, the
        usual one is too narrow, and of no width when they all point the same way.
        """
        if self.n != other.n or self.metric.name != other.metric.name:
            raise TaskError(
                describe(
                    "paired difference of scores",
                    expected=f"{self.metric.name} of the same {self.n} samples",
                    found=f"{other.metric.name} of {other.n} in the other",
                    fix="compare complete evaluations on the same data in the same order",
                )
            )
        if not self.metric.is_mean:
            return self.value - other.value, *_resampled_interval([self, other], confidence)
        delta = self.table[:, 0] - other.table[:, 0]  # (n,)
        mean = float(delta.mean())
        if self._right_or_wrong and other._right_or_wrong:
            better, worse = int((delta > 0).sum()), int((delta < 0).sum())
            return mean, *_bonett_price(better, worse, self.n, confidence)
        half = _student(confidence, self.n - 1) * _standard_error(delta)
        return mean, mean - half, mean + half

    @property
    def _right_or_wrong(self) -> bool:
        return bool(((self.table == 0) | (self.table == 1)).all())


def worded(scores: Scores) -> str:
    """A score with its uncertainty, as notes and sentences show it."""
    value, (low, high) = scores.value, scores.interval()
    if scores.metric.percent:
        return f"{100 * value:.2f} % (95 % interval {100 * low:.2f} to {100 * high:.2f}, n = {scores.n})"
    return f"{value:.4g} (95 % interval {low:.4g} to {high:.4g}, n = {scores.n})"


# Resampling -------------------------------------------------------------------------------------------


def _resampled_interval(scores: Sequence[Scores], confidence: float) -> tuple[float, float]:
    """Percentiles of the value, or of the first minus the second, over samples drawn again with replacement.

    Both of a pair are drawn alike. The percentiles are taken further out by Hesterberg's (2015) correction for few
    samples, which makes the interval of a mean as wide as Student's. Draws on which a metric has no value, such as
    AUC with one class, are left out; without half of them there is no interval.
    """
    n = scores[0].n
    if n < 2:
        return -math.inf, math.inf
    reach = _student(confidence, n - 1) * math.sqrt(n / (n - 1))
    tail = NormalDist().cdf(-reach)
    found = [_resampled(each) for each in scores]
    values = found[0] if len(found) == 1 else found[0] - found[1]  # (RESAMPLES,)
    values = values[values.isfinite()]
    if len(values) < RESAMPLES / 2:
        return -math.inf, math.inf
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high


def _resampled(scores: Scores) -> Tensor:
    """The value of every draw; the draws depend on the number of samples only. (RESAMPLES,)"""
    table, metric = scores.table, scores.metric
    found: list[Tensor] = []
    for rows in _draws(scores.n):  # (B, N)
        if metric.resampled is None:
            found.append(torch.tensor([metric.reduce(table[row]) for row in rows], dtype=torch.float64))
        else:
            ones = torch.ones((), dtype=table.dtype).expand(rows.shape)
            counts = torch.zeros(rows.shape, dtype=table.dtype).scatter_add_(1, rows, ones)
            found.append(metric.resampled(table, counts))
    return torch.cat(found)


def _draws(n: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(n)
    piece = max(1, _PIECE // n)
    for start in range(0, RESAMPLES, piece):
        yield torch.randint(n, (min(piece, RESAMPLES - start), n), generator=generator)


# Closed forms -----------------------------------------------------------------------------------------


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


def _standard_error(values: Tensor) -> float:
    n = values.numel()
    return math.inf if n < 2 else float(values.std()) / math.sqrt(n)
