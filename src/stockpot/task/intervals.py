"""How sure a number found on samples is: closed forms for means, resampled samples for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from stockpot.errors import TaskError

RESAMPLES = 1000
UNITS = 4096  # how many things are drawn from at most: single samples, or groups of them where there are more
_PIECE = 250_000  # numbers handled at a time; more would leave the processor's cache

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


def normal(confidence: float) -> float:
    """How many standard errors either side of the mean a normal interval reaches."""
    if not 0 < confidence < 1:
        raise TaskError.of(
            "confidence of an interval",
            expected="a number between 0 and 1",
            found=str(confidence),
            fix="use 0.95 for a 95 % interval",
        )
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def student(confidence: float, freedom: int) -> float:
    """The same for Student's distribution: wider when there are few scores."""
    z = normal(confidence)
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


def standard_error(values: Tensor) -> float:
    """Of the mean of (N,); infinite for one value."""
    n = values.numel()
    return math.inf if n < 2 else float(values.std()) / math.sqrt(n)


# Resampling -------------------------------------------------------------------------------------------

Counted = Callable[[Tensor], Tensor]  # counts (B, N), how often each sample was drawn -> values (B,)


def resampled(
    metrics: Sequence[Callable[[Tensor], Counted]], tables: Sequence[Tensor], confidence: float
) -> tuple[float, float]:
    """Percentiles of a value, or of a first minus a second, over samples drawn again with replacement.

    `metrics` turn the tables (N, m) into functions of the counts. Both of a pair see the same draws, which depend on
    the number of samples only. More than `UNITS` samples are put into that many groups by chance and drawn by groups:
    every sample is still drawn once on average with the same variance, and drawing costs no more for many samples.
    The percentiles are taken further out by Hesterberg's (2015) correction for few samples, which makes the interval
    of a mean as wide as Student's. Draws on which a metric has no value, such as AUC with one class, are left out;
    without half of them there is no interval.
    """
    n = len(tables[0])
    if n < 2:
        return -math.inf, math.inf
    generator = torch.Generator().manual_seed(n)
    units = min(n, UNITS)
    if n > units:
        shuffled = torch.randperm(n, generator=generator)
        tables = [table[shuffled] for table in tables]
    functions = [metric(table) for metric, table in zip(metrics, tables, strict=True)]
    size = max(1, _PIECE // n)
    found = []
    for start in range(0, RESAMPLES, size):
        drawn = torch.randint(units, (min(size, RESAMPLES - start), units), generator=generator)
        drawn += torch.arange(len(drawn))[:, None] * units
        counts = torch.bincount(drawn.view(-1), minlength=drawn.numel()).view(drawn.shape).double()
        counts = counts.repeat(1, -(-n // units))[:, :n]  # (B, N), the count of each sample's group
        values = [function(counts) for function in functions]
        found.append(values[0] if len(values) == 1 else values[0] - values[1])
    every = torch.cat(found)  # (RESAMPLES,)
    every = every[every.isfinite()]
    if len(every) < RESAMPLES / 2:
        return -math.inf, math.inf
    tail = NormalDist().cdf(-student(confidence, n - 1) * math.sqrt(n / (n - 1)))
    low, high = torch.quantile(every, torch.tensor([tail, 1 - tail], dtype=every.dtype)).tolist()
    return low, high
