"""Scores are what a metric found on samples, and how sure that is.

Means and ratios have closed forms for their intervals; every other metric is computed on samples drawn again. Samples
of one group are one independent unit: they are added up, or drawn, together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

from stockpot.errors import TaskError
from stockpot.task.batches import users_code
from stockpot.task.metric import Metric

RESAMPLES = 1000
UNITS = 4096  # how many things are drawn from at most: single samples, or groups of them where there are more
_PIECE = 250_000  # numbers handled at a time; more would leave the processor's cache


@dataclass(frozen=True, eq=False)
class Scores:
    """A metric's statistics of each sample, in evaluation order, and what they come to; higher is better."""

    table: Tensor  # (N, m) float64 on the host
    metric: Metric
    loss: float = math.nan
    complete: bool = True
    units: Tensor | None = None  # (N,) the independent unit of each sample; None: each is its own

    @property
    def n(self) -> int:
        return self.table.shape[0]

    @property
    def independent(self) -> int:
        """How many units there are."""
        return self.n if self.units is None else len(torch.unique(self.units))

    @property
    def value(self) -> float:
        """The reduced number; NaN where the metric has none."""
        with users_code(f"reduction of metric {self.metric.name}", self.metric.reduce, self.table):
            return float(self.metric.reduce(self.table))

    def rows(self, indices: Tensor) -> Scores:
        """Of some samples only, in this order; the loss is that of all samples and is left out."""
        units = None if self.units is None else self.units[indices]
        return replace(self, table=self.table[indices], loss=math.nan, units=units)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Wilson's for scores of 0 and 1, Student's for other means and ratios, else from resampled units."""
        if not self._closed:
            return resampled([self], confidence)
        if self._right_or_wrong:
            judged = self.n if self.metric.is_mean else int(self.table[:, 1].sum())
            return wilson(self.value, judged, confidence) if judged else (-math.inf, math.inf)
        return around(self.value, self._without_each()[self._counts()], confidence)

    def difference(self, other: Scores, confidence: float = 0.95) -> tuple[float, float, float]:
        """Value of self minus other with its interval, paired unit by unit.

        Bonett and Price's for scores of 0 and 1, Student's for other means and ratios, else from resampled units.
        """
        if self.n != other.n or self.metric.name != other.metric.name:
            raise TaskError.of(
                "paired difference of scores",
                expected=f"{self.metric.name} of the same {self.n} samples",
                found=f"{other.metric.name} of {other.n} in the other",
                fix="compare complete evaluations on the same data in the same order",
            )
        gap = self.value - other.value
        mine, others = self._counts(), other._counts()  # (U,)
        if self._closed and self._right_or_wrong and other._right_or_wrong and torch.equal(mine, others):
            delta = (self.table - other.table)[mine, 0]  # (n,)
            better, worse = int((delta > 0).sum()), int((delta < 0).sum())
            return gap, *bonett_price(better, worse, len(delta), confidence)
        if self._closed:
            low, high = around(gap, (self._without_each() - other._without_each())[mine | others], confidence)
        else:
            low, high = resampled([self, other], confidence)
        # However they fall, so few units that differ may all be on one side by chance.
        same = self.table.shape == other.table.shape
        differ = (self.table != other.table).any(dim=1) if same else torch.ones(self.n, dtype=torch.bool)
        count = int(differ.sum()) if self.units is None else len(torch.unique(self.units[differ]))
        every = self._closed and count == int((mine | others).sum())
        if 2.0 ** (1 - count) > 1 - confidence and not every:
            low, high = min(low, 0.0), max(high, 0.0)
        return gap, low, high

    @property
    def _closed(self) -> bool:
        return self.metric.is_mean or self.metric.ratio is not None

    @property
    def _right_or_wrong(self) -> bool:
        whole = self.metric.is_mean or self.metric.ratio == 1.0
        return whole and self.units is None and bool(((self.table == 0) | (self.table == 1)).all())

    def _without_each(self) -> Tensor:
        """The mean or ratio without each of the units, (U,)."""
        total, weight = self._sums()
        return (total.sum() - total) / (weight.sum() - weight)

    def _counts(self) -> Tensor:
        """Which units have any weight, (U,): others say nothing, and are no evidence."""
        return self._sums()[1] != 0

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Total and weight of each unit, (U,)."""
        total, weight = self.table[:, 0], torch.ones(self.n, dtype=self.table.dtype)
        if self.metric.ratio is not None:
            total, weight = self.metric.ratio * total, self.table[:, 1]
        if self.units is not None:
            place = torch.unique(self.units, return_inverse=True)[1]
            empty = torch.zeros(int(place.max()) + 1, dtype=total.dtype)
            total, weight = empty.index_add(0, place, total), empty.index_add(0, place, weight)
        return total, weight


def worded(scores: Scores) -> str:
    """A score with its uncertainty, as notes and sentences show it."""
    value, (low, high) = scores.value, scores.interval()
    n = f"n = {scores.n}" if scores.units is None else f"n = {scores.n} in {scores.independent} groups"
    if math.isnan(value):
        return f"no number ({odd(scores)})"
    if scores.metric.percent:
        return f"{100 * value:.2f} % (95 % interval {100 * low:.2f} to {100 * high:.2f}, {n})"
    return f"{value:.4g}{scores.metric.unit and ' '}{scores.metric.unit} (95 % interval {low:.4g} to {high:.4g}, {n})"


def odd(scores: Scores) -> str:
    """Why there is no number."""
    rows = scores.table.isnan().any(dim=1).nonzero().flatten()
    if not len(rows):
        return f"{scores.metric.name} has no value on this data"
    first = f"first for number {int(rows[0])} (from 0)"
    return f"{scores.metric.name} is NaN for {len(rows)} of {scores.n} samples, {first}"


# Closed forms -----------------------------------------------------------------------------------------


def wilson(share: float, n: int, confidence: float) -> tuple[float, float]:
    """Interval of a proportion."""
    z = normal(confidence)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def bonett_price(better: int, worse: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a difference of paired proportions (Bonett and Price, 2012), one sample added on either side.

    Where few samples make the difference, the usual interval is too narrow, and of no width when they all point the
    same way. This one never excludes zero where the exact test (the signs of the samples that differ) would not.
    """
    up, down = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    half = normal(confidence) * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    low, high = max(up - down - half, -1.0), min(up - down + half, 1.0)
    differ = better + worse
    if not low <= 0 <= high and differ <= 1000:  # beyond that the normal interval is as good
        tail = sum(math.comb(differ, i) for i in range(min(better, worse) + 1)) / (1 << differ)
        if 2 * tail > 1 - confidence:
            low, high = min(low, 0.0), max(high, 0.0)
    return low, high


def normal(confidence: float) -> float:
    """How many standard errors either side of the mean a normal interval reaches."""
    if not 0 < confidence < 1:
        raise TaskError.of(
            "confidence of an interval", "a number between 0 and 1", str(confidence), "use 0.95 for a 95 % interval"
        )
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def student(confidence: float, freedom: int) -> float:
    """The same for Student's distribution: wider when there are few scores."""
    z, p = normal(confidence), 0.5 + confidence / 2
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


def around(value: float, without_each: Tensor, confidence: float) -> tuple[float, float]:
    """Student's interval from the values (U,) without each of the units (the jackknife); all numbers for one unit.

    For a mean over samples this is the usual interval.
    """
    n = without_each.numel()
    if n < 2 or not bool(without_each.isfinite().all()):
        return (-math.inf, math.inf) if math.isfinite(value) else (math.nan, math.nan)
    half = student(confidence, n - 1) * (n - 1) / math.sqrt(n) * float(without_each.std())
    return value - half, value + half


# Resampling -------------------------------------------------------------------------------------------


def resampled(scores: Sequence[Scores], confidence: float) -> tuple[float, float]:
    """Percentiles of a value, or of a first minus a second, over units drawn again with replacement.

    Both of a pair see the same draws, which depend on the number of units only. More than `UNITS` of them are put
    into that many groups by chance and drawn by groups: every sample is still drawn once on average with the same
    variance, and drawing costs no more for many samples. The percentiles are taken further out by Hesterberg's (2015)
    correction for few samples, which makes the interval of a mean as wide as Student's. Draws on which a metric has no
    value, such as AUC with one class, are left out; without half of them there is no interval.
    """
    first = scores[0]
    n, independent = first.n, first.independent
    if independent < 2:
        return -math.inf, math.inf
    generator = torch.Generator().manual_seed(independent)
    units = min(independent, UNITS)
    own = torch.arange(n) if first.units is None else torch.unique(first.units, return_inverse=True)[1]  # (N,)
    if independent > units:
        own = (torch.randperm(independent, generator=generator) % units)[own]
    functions = [each.metric.of_draws(each.table) for each in scores]
    size = max(1, _PIECE // n)
    found = []
    for start in range(0, RESAMPLES, size):
        drawn = torch.randint(units, (min(size, RESAMPLES - start), units), generator=generator)
        drawn += torch.arange(len(drawn))[:, None] * units
        counts = torch.bincount(drawn.view(-1), minlength=drawn.numel()).view(drawn.shape).double()
        counts = counts[:, own]  # (B, N), how often each sample was drawn
        values = [function(counts) for function in functions]
        found.append(values[0] if len(values) == 1 else values[0] - values[1])
    every = torch.cat(found)  # (RESAMPLES,)
    every = every[every.isfinite()]
    if len(every) < RESAMPLES / 2:
        return -math.inf, math.inf
    wider = math.sqrt(independent / (independent - 1))
    tail = NormalDist().cdf(-student(confidence, independent - 1) * wider)
    low, high = torch.quantile(every, torch.tensor([tail, 1 - tail], dtype=every.dtype)).tolist()
    return low, high
