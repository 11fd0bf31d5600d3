"""Splitting the fitting data for cross-fitting."""

from __future__ import annotations

import torch
from torch import Tensor

from stockpot.errors import DataError, describe
from stockpot.task.order import generator


def folds(size: int, n: int, seed: int, labels: Tensor | None, name: str) -> list[tuple[Tensor, Tensor]]:
    """`n` pairs (fit, held out) of sorted indices; every sample is held out once, classes spread evenly."""
    if n < 2:
        raise DataError(
            describe(
                f"folds of {name}",
                expected="at least 2 folds",
                found=str(n),
                fix="ask for 2 or more folds, or use a method that does not cross-fit",
            )
        )
    if size < 2 * n:
        raise DataError(
            describe(
                f"folds of {name}",
                expected=f"at least {2 * n} samples for {n} folds",
                found=str(size),
                fix="give more fitting data, use fewer folds (method.folds in a recipe), or a method without: greedy",
            )
        )
    shuffled = torch.randperm(size, generator=generator("folds", seed))
    if labels is not None:
        # Stable: shuffled within each class. Dealing this out card by card then keeps both
        # the fold sizes and each class's share of every fold within one sample of even.
        shuffled = shuffled[torch.argsort(labels[shuffled], stable=True)]
    fold = torch.empty(size, dtype=torch.long)
    fold[shuffled] = torch.arange(size) % n
    return [((fold != k).nonzero().flatten(), (fold == k).nonzero().flatten()) for k in range(n)]
