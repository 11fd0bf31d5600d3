"""Which prefix to replace so that a pool's tensor names become the model's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_ALIKE = 4  # places considered for one tensor
_TRIED = 16  # candidates that are looked at closely

Shapes = Mapping[str, tuple[int, ...]]


def suggest_rename(pool: Shapes, model: Shapes) -> dict[str, str] | None:
    """The shortest map of prefixes, old to new, that gives more of the pool a place in the model; None if none does."""
    strangers = [name for name in pool if name not in model]
    by_ending: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in model.items():
        if name not in pool:
            for ending in _endings(name):
                by_ending.setdefault((ending, shape), []).append(name)
    candidates: Counter[tuple[tuple[str, str], ...]] = Counter()
    for name in strangers:
        # The longest common ending leaves the shortest prefixes.
        common = next((e for e in _endings(name) if (e, pool[name]) in by_ending), "")
        for there in by_ending.get((common, pool[name]), ())[:_ALIKE]:
            old, new = name.removesuffix(common), there.removesuffix(common)
            candidates[((old, new),)] += 1
            if not old:  # a prefix for all names, or only for those that have no place yet
                firsts = dict.fromkeys(f"{n.partition('.')[0]}{'.' if '.' in n else ''}" for n in strangers)
                candidates[tuple((first, new + first) for first in firsts)] += 1
    best, most = None, _placed(pool, model, {})
    for candidate, _ in candidates.most_common(_TRIED):
        placed = _placed(pool, model, dict(candidate))
        if placed > most or (placed == most and best is not None and len(candidate) < len(best)):
            best, most = dict(candidate), placed
    return best


def left_over(pool: Shapes, model: Shapes, rename: Mapping[str, str]) -> int:
    """Tensors of the pool that still have no place after renaming."""
    return len(pool) - _placed(pool, model, rename)


def in_yaml(rename: Mapping[str, str]) -> str:
    """As it is written in a recipe, and just as well in Python."""
    return "{" + ", ".join(f"{old!r}: {new!r}" for old, new in rename.items()) + "}"


def _endings(name: str) -> list[str]:
    """The name and what is left of it after each dot, longest first."""
    parts = name.split(".")
    return [".".join(parts[cut:]) for cut in range(len(parts))]


def _placed(pool: Shapes, model: Shapes, rename: Mapping[str, str]) -> int:
    """How many tensors have a place of their own shape once the longest fitting prefix is replaced."""
    places: dict[str, Any] = {}
    for name, shape in pool.items():
        old = max((o for o in rename if name.startswith(o)), key=len, default=None)
        new = name if old is None else rename[old] + name[len(old) :]
        if model.get(new) == shape:
            places[new] = name
    return len(places)
