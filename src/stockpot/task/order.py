"""In which order samples are seen: a pure function of seed and step, so that a run can restart anywhere."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def generator(*stream: int | str) -> torch.Generator:
    """An independent random stream named by its arguments alone."""
    # Hashed, not added: seed 1 epoch 2 must not be the same stream as seed 2 epoch 1.
    digest = hashlib.sha256(repr(stream).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


# Cross-fitting walks through several subsets in turn, each with its own current epoch.
@lru_cache(maxsize=16)
def _permutation(n: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(n, generator=generator("epoch", seed, epoch))  # (n,)


def order(n: int, seed: int, step: int, batch_size: int) -> Tensor:
    """Piece number `step` of the endless concatenation of one permutation of range(n) per epoch."""
    size = min(batch_size, n)
    start, stop = step * size, (step + 1) * size
    pieces = []
    for epoch in range(start // n, (stop - 1) // n + 1):
        first = epoch * n
        pieces.append(_permutation(n, seed, epoch)[max(start - first, 0) : stop - first])
    return torch.cat(pieces)  # (size,)
