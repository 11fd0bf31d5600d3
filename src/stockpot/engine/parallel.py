"""Data-parallel learning: workers exchange coefficient gradients only.

The projection is linear, so the (b, G) projections of the workers' gradients add up to the projection of the whole
batch's gradient: kilobytes per step instead of the model's size. Works whenever `torch.distributed` is initialised.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor


def active() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def share(indices: Tensor) -> Tensor:
    """This worker's part of a batch."""
    return indices[dist.get_rank() :: dist.get_world_size()] if active() else indices


def add_up(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the workers."""
    if active():
        for tensor in tensors:
            dist.all_reduce(tensor)
