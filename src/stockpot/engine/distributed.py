"""Ranks of `torch.distributed`: each takes a part of every batch, and coefficient gradients are added up.

The projection is linear, so the (b, G) projections of the ranks' gradients add up to that of the whole batch: kilobytes
per step instead of the model's size. Everything here does nothing where there is one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def active() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def share(indices: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return indices[dist.get_rank() :: dist.get_world_size()] if active() else indices


def add_up(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the ranks."""
    if active():
        for tensor in tensors:
            dist.all_reduce(tensor)


def decided_once(decide: Callable[[], T]) -> T:
    """What rank 0 decides, on every rank. All of them compute it, because computing may need their devices."""
    mine = decide()
    if not active():
        return mine
    box = [mine]
    dist.broadcast_object_list(box, src=0)
    return box[0]
