"""Directions rounded to bf16 or int8, in plain PyTorch: the meaning of kernels.encode, and its fallback."""

from __future__ import annotations

import bisect

import torch
from torch import Tensor
from torch.nn.functional import pad

from stockpot.engine.plan import FlatPlan
from stockpot.engine.tiles import TILE, Tiles


def encode_plain(row: Tensor, out: Tensor, scale: Tensor | None, plan: FlatPlan, tiles: Tiles | None) -> None:
    """row: (P,) exact -> out: (P,) rounded; for int8 also scale: (tiles,), each tile's largest value over 127."""
    if out.dtype != torch.int8:
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
        factors = table.abs().amax(dim=1) / 127.0  # (tiles of the group,)
        scale[first:last] = factors
        # Below the smallest normal number the factor itself is rounded, and 127 steps of it are not enough.
        sound = factors[:, None] >= torch.finfo(torch.float32).tiny
        whole = torch.where(sound, table / factors[:, None], torch.zeros_like(table))
        out[start:stop] = torch.floor(whole + 0.5).view(-1)[: stop - start].to(torch.int8)
