"""Accuracy against the number of ingredients: the first 2, 4, 8, ... of the pool, cooked like the whole."""

from __future__ import annotations

from collections.abc import Iterable

METHODS = ("uniform", "greedy", "crossfit")


def sizes(models: int) -> list[int]:
    """2, 4, 8, ... and the whole pool."""
    out = []
    n = 2
    while n < models:
        out.append(n)
        n *= 2
    return [*out, models]


def methods(asked: Iterable[str]) -> list[str]:
    """Those of the comparison whose growth is worth its time."""
    given = set(asked)
    return [name for name in METHODS if name in given]
