"""The flat vector cut into tiles that never cross a tensor: one tile is one program of a kernel."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch
from torch import Tensor

from stockpot.engine.plan import FlatPlan

TILE = 4096
ALIGN = 128  # elements: every tensor starts on a 128-byte boundary even as int8


@dataclass(frozen=True)
class Tiles:
    start: Tensor  # (n,) int64
    length: Tensor  # (n,) int32, a multiple of ALIGN
    group: Tensor  # (n,) int32
    first: Tensor  # (G + 1,) int32: tiles first[j] to first[j + 1] are group j's

    @classmethod
    def of(cls, plan: FlatPlan, device: torch.device | str, size: int = TILE) -> Tiles:
        starts: list[int] = []
        lengths: list[int] = []
        groups: list[int] = []
        ends = [slot.start for slot in plan.slots[1:]] + [
            plan.size
        ]  # the gap behind a tensor is part of its tiles
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
