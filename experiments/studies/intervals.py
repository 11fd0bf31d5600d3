"""Means with 95 % intervals over samples, and over samples and seeds.

Over several seeds, a difference varies with the test samples and with the seed. Both are taken as drawn at random and
independently of each other: the variance of the mean is that of the samples' means (averaged over seeds) plus that of
the seeds' means (averaged over samples). What is due to neither alone is counted in both, so the interval is a
little too wide rather than too narrow; with few seeds its second part is itself uncertain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray

from stockpot.task import Scores

Numbers = NDArray[np.float64]
Interval = tuple[float, float, float]  # mean, low, high
Z = NormalDist().inv_cdf(0.975)


def over_samples(values: Numbers, batches: Sequence[int] | None = None) -> Interval:
    """One run: values (n,) are scores, or differences of scores on the same samples."""
    return over_seeds(values[None], batches)


def over_seeds(values: Numbers, batches: Sequence[int] | None = None) -> Interval:
    """Several runs on the same samples: values (S, n)."""
    seeds = values.shape[0]
    # One run's variance is about samples only; stockpot's own standard error knows scores given by batch.
    by_sample = Scores(
        torch.from_numpy(values.mean(axis=0)), batches=None if batches is None else tuple(batches)
    )
    variance = by_sample.standard_error**2
    if seeds > 1:
        variance += float(values.mean(axis=1).var(ddof=1)) / seeds
    half = Z * math.sqrt(variance)
    mean = float(values.mean())
    return mean, mean - half, mean + half


def standard_error(interval: Interval) -> float:
    """Of the mean that the interval belongs to."""
    return (interval[2] - interval[1]) / (2 * Z)
