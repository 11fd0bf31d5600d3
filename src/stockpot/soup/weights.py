"""The mixing weights W: a (K, G) matrix whose columns each sum to one.

Every soup is such a matrix; a method only decides its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stockpot.errors import SoupError

SUM_TOLERANCE = 1e-6


def uniform(models: int, groups: int) -> Tensor:
    return torch.full((models, groups), 1.0 / models, dtype=torch.float64)


def chosen(models: int, groups: int, rows: Iterable[int]) -> Tensor:
    """1/n on the n chosen rows: one row is the best individual, several are a greedy soup."""
    picked = list(rows)
    W = torch.zeros(models, groups, dtype=torch.float64)
    W[picked] = 1.0 / len(picked)
    return W


def check(W: Tensor, models: int, groups: int) -> Tensor:
    if tuple(W.shape) != (models, groups):
        expected = f"a matrix of {models} ingredients x {groups} groups"
        fix = "make one row per ingredient of the pool and one column per group of the layout"
        raise SoupError.of("mixing weights", expected=expected, found=f"shape {tuple(W.shape)}", fix=fix)
    W = W.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(W).all()):
        raise SoupError.of(
            "mixing weights",
            expected="finite numbers",
            found=f"{int((~torch.isfinite(W)).sum())} NaN or Inf",
            fix="lower the learning rate; a soup is never saved with such weights",
        )
    worst = float((W.sum(dim=0) - 1.0).abs().max())
    # Weights that are large and cancel are rounded in proportion.
    if worst > SUM_TOLERANCE * max(1.0, float(W.abs().max())):
        raise SoupError.of(
            "mixing weights",
            expected="columns that sum to one",
            found=f"a column off by {worst:.3g}",
            fix="divide each column by its sum",
        )
    return W


def heaviest(W: Tensor) -> int:
    """The ingredient with the largest mean weight; the first of equals."""
    return int(W.mean(dim=1).argmax())


def single(W: Tensor) -> int | None:
    """The one ingredient a soup consists of, if it does."""
    rows = torch.nonzero((W != 0).any(dim=1)).flatten().tolist()
    return int(rows[0]) if len(rows) == 1 and bool((W[rows[0]] == 1).all()) else None
