"""Where each mixed tensor lies in one flat vector of length P, and the tiles that GPU kernels cut it into."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stockpot.layout import Layout
from stockpot.pool import TensorSpec

TILE = 4096
ALIGN = 128  # elements: every tensor starts on a 128-byte boundary even as int8


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
    """All mixed tensors in one vector of length P, those of one coefficient group side by side.

    With `align` > 1 every tensor starts at a multiple of it and so does the end, for wide loads on a GPU; the gaps
    are zero in everything that is laid out this way.
    """

    slots: tuple[Slot, ...]
    bounds: tuple[tuple[int, int], ...]  # per group: where its tensors start and stop, gaps included
    size: int  # P

    @classmethod
    def of(cls, layout: Layout, specs: Mapping[str, TensorSpec], align: int = 1) -> FlatPlan:
        first_of = {name: names[0] for names in layout.tied for name in names}
        members: dict[str, list[str]] = {}
        for name in layout.group_of:
            members.setdefault(first_of.get(name, name), []).append(name)
        by_group: dict[int, list[list[str]]] = {}
        for names in members.values():
            by_group.setdefault(layout.group_of[names[0]], []).append(names)
        slots: list[Slot] = []
        bounds: list[tuple[int, int]] = []
        position = 0
        for group in range(len(layout)):
            begin = position
            for names in sorted(by_group[group]):  # so that layouts of other groups have the same places
                shape = tuple(specs[names[0]].shape)
                stop = position + math.prod(shape)
                slots.append(Slot(tuple(names), shape, position, stop, group))
                position = -(-stop // align) * align
            bounds.append((begin, position))
        return cls(tuple(slots), tuple(bounds), position)

    @property
    def groups(self) -> int:
        return len(self.bounds)

    def overlapping(self, lo: int, hi: int) -> tuple[Slot, ...]:
        """The tensors that have a part between two places."""
        first = bisect.bisect_right(self.slots, lo, key=lambda slot: slot.stop)
        last = bisect.bisect_left(self.slots, hi, key=lambda slot: slot.start)
        return self.slots[first:last]


@dataclass(frozen=True)
class Tiles:
    """Pieces of the flat vector that never cross a tensor: one tile is one program of a kernel."""

    start: Tensor  # (n,) int64
    length: Tensor  # (n,) int32, a multiple of ALIGN
    group: Tensor  # (n,) int32
    first: Tensor  # (G + 1,) int32: tiles first[j] to first[j + 1] are group j's

    @classmethod
    def of(cls, plan: FlatPlan, device: torch.device | str, size: int = TILE) -> Tiles:
        starts: list[int] = []
        lengths: list[int] = []
        groups: list[int] = []
        # The gap behind a tensor is part of its tiles.
        ends = [slot.start for slot in plan.slots[1:]] + [plan.size]
        for slot, end in zip(plan.slots, ends, strict=True):
            for start in range(slot.start, end, size):
                starts.append(start)
                lengths.append(min(size, end - start))
                groups.append(slot.group)
        first = [bisect.bisect_left(groups, j) for j in range(plan.groups + 1)]
        return cls(
            torch.tensor(starts, dtype=torch.int64, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            torch.tensor(groups, dtype=torch.int32, device=device),
            torch.tensor(first, dtype=torch.int32, device=device),
        )

    @property
    def count(self) -> int:
        return self.start.numel()
