"""Where each mixed tensor lies in one flat vector: pure arithmetic, no tensor is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from stockpot.layout import Layout


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Slot:
    """One tensor's place; `names` has more than one entry for tied tensors."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    group: int


@dataclass(frozen=True)
class FlatPlan:
    """All mixed tensors in one vector of length P, those of one coefficient group side by side."""

    slots: tuple[Slot, ...]
    bounds: tuple[tuple[int, int], ...]  # per group: where its tensors start and stop
    size: int  # P

    @classmethod
    def of(cls, layout: Layout, specs: Mapping[str, Shaped]) -> FlatPlan:
        first_of = {name: names[0] for names in layout.tied for name in names}
        members: dict[str, list[str]] = {}
        for name in layout.group_of:
            members.setdefault(first_of.get(name, name), []).append(name)
        slots: list[Slot] = []
        bounds: list[tuple[int, int]] = []
        position = 0
        by_group: dict[int, list[list[str]]] = {}
        for names in members.values():
            by_group.setdefault(layout.group_of[names[0]], []).append(names)
        for group in range(len(layout)):
            begin = position
            for names in by_group[group]:
                shape = tuple(specs[names[0]].shape)
                size = math.prod(shape)
                slots.append(Slot(tuple(names), shape, position, position + size, group))
                position += size
            bounds.append((begin, position))
        return cls(tuple(slots), tuple(bounds), position)

    @property
    def groups(self) -> int:
        return len(self.bounds)
