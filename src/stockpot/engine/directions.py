"""The flat vector of all mixed tensors, and the loaded block: directions d_k = theta_k - theta_bar of b models in it.

`project` and `mix` are adjoint: <mix(a), g> = <a, project(g)>. The two functions are their meaning, in plain PyTorch
and the paper's notation; the class has them for rows that are exact (fp32, fp64) or rounded (bf16, int8), and uses the
kernels of engine/kernels.py where the rows lie on a CUDA device. Those cut the vector into tiles.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

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


# Directions ----------------------------------------------------------------------------------------------


Bounds = Sequence[tuple[int, int]]  # per group: where its tensors start and stop in the flat vector


def project(directions: Tensor, gradient: Tensor, bounds: Bounds) -> Tensor:
    """grad alpha[k, j] = sum over tensors l in group j of <g[l], d_k[l]> (paper, eq. 6).

    directions: (b, P), gradient: (P,) -> (b, G)
    """
    out = torch.empty(directions.shape[0], len(bounds), dtype=gradient.dtype, device=gradient.device)
    for j, (start, stop) in enumerate(bounds):
        out[:, j] = directions[:, start:stop].to(gradient.dtype) @ gradient[start:stop]
    return out


def mix(directions: Tensor, alpha: Tensor, bounds: Bounds) -> Tensor:
    """sum_k alpha[k, group(l)] d_k[l], flat (paper, Algorithm 1, line 9 without theta_fix).

    directions: (b, P), alpha: (b, G) -> (P,)
    """
    out = torch.empty(directions.shape[1], dtype=alpha.dtype, device=alpha.device)
    for j, (start, stop) in enumerate(bounds):
        out[start:stop] = alpha[:, j] @ directions[:, start:stop].to(alpha.dtype)
    return out


SCALED = (torch.int8,)  # rows of these have a scale for each model and tile


def row_bytes(dtype: torch.dtype, P: int) -> int:
    """What one direction takes, with its scales."""
    return P * dtype.itemsize + (4 * -(-P // TILE) if dtype in SCALED else 0)


class Directions:
    """b rows of length P on the device; int8 rows have one scale per model and tile."""

    def __init__(
        self,
        rows: Tensor,  # (b, P)
        plan: FlatPlan,
        *,
        tiles: Tiles | None = None,
        tile_scale: Tensor | None = None,  # (tiles, b) fp32, for int8
    ) -> None:
        self.rows = rows
        self.plan = plan
        self.tiles = tiles
        self.tile_scale = tile_scale
        self.fast = rows.is_cuda and tiles is not None and rows.dtype != torch.float64

    def project(self, gradient: Tensor) -> Tensor:
        """(P,) -> (b, G)"""
        if self.fast:
            from stockpot.engine import kernels

            assert self.tiles is not None
            return kernels.project(self.rows, gradient, self.tiles, self.tile_scale)
        dtype = gradient.dtype
        out = torch.empty(self.rows.shape[0], self.plan.groups, dtype=dtype, device=gradient.device)
        for j, (start, stop) in enumerate(self.plan.bounds):
            torch.mv(self.part(start, stop, dtype), gradient[start:stop], out=out[:, j])
        return out

    def mix(self, fixed: Tensor, alpha: Tensor, out: Tensor) -> None:
        """out = fixed + sum_k alpha[k, group] * d_k. fixed, out: (P,); alpha: (b, G)."""
        if self.fast:
            from stockpot.engine import kernels

            assert self.tiles is not None
            kernels.mix(self.rows, fixed, alpha.float().contiguous(), out, self.tiles, self.tile_scale)
            return
        for j, (start, stop) in enumerate(self.plan.bounds):
            rows = self.part(start, stop, fixed.dtype)
            if out.dtype == fixed.dtype:
                torch.addmv(fixed[start:stop], rows.T, alpha[:, j], out=out[start:stop])
            else:
                out[start:stop] = torch.addmv(fixed[start:stop], rows.T, alpha[:, j])

    def part(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Whole tensors between two places, in the dtype of the sum; a view when nothing was rounded. (b, n)"""
        rows = self.rows[:, start:stop].to(dtype)
        if self.tile_scale is None or self.tiles is None:
            return rows
        ends = torch.tensor([start, stop], device=self.tiles.start.device)
        first, last = torch.searchsorted(self.tiles.start, ends).tolist()
        factors = self.tile_scale[first:last].repeat_interleave(self.tiles.length[first:last].long(), dim=0)
        return rows * factors[: stop - start].T.to(dtype)


def encode_plain(row: Tensor, out: Tensor, scale: Tensor | None, plan: FlatPlan, tiles: Tiles | None) -> None:
    """Round a direction: the meaning of kernels.encode, and its fallback.

    row: (P,) exact -> out: (P,) rounded; for int8 also scale: (tiles,), each tile's largest value over 127.
    """
    if out.dtype not in SCALED:
        out.copy_(row)
        return
    assert scale is not None
    assert tiles is not None
    starts = tiles.start.tolist()
    ends = [slot.start for slot in plan.slots[1:]] + [plan.size]
    for slot, stop in zip(plan.slots, ends, strict=True):
        start = slot.start
        if start == stop:
            continue
        first = bisect.bisect_left(starts, start)
        last = first + -(-(stop - start) // TILE)
        table = pad(row[start:stop], (0, (last - first) * TILE - (stop - start))).view(last - first, TILE)
        factors = table.abs().amax(dim=1) / 127.0  # (tiles of the tensor,)
        # Below the smallest normal number the factor itself is rounded, and 127 steps of it are not enough.
        factors = torch.where(factors >= torch.finfo(torch.float32).tiny, factors, torch.zeros_like(factors))
        scale[first:last] = factors
        whole = torch.where(factors[:, None] > 0, table / factors[:, None], torch.zeros_like(table))
        out[start:stop] = torch.floor(whole + 0.5).view(-1)[: stop - start].to(torch.int8)
