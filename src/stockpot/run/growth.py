"""Accuracy against the number of ingredients: the first half of the pool, a quarter, ..., cooked like the whole."""

from __future__ import annotations

from collections.abc import Iterable

METHODS = ("uniform", "greedy", "crossfit")


def sizes(models: int) -> list[int]:
    """At most four: the whole pool, its first half, quarter and eighth, as long as there are two to mix."""
    out = [models]
    while out[0] // 2 >= 2 and len(out) < 4:
        out.insert(0, out[0] // 2)
    return out


def methods(asked: Iterable[str]) -> list[str]:
    """Those of the comparison whose growth is worth its time."""
    given = set(asked)
    return [name for name in METHODS if name in given]
