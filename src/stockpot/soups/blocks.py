"""Which models are loaded together, and in which order: a pure function of seed, K, b and T."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import torch

from stockpot.soups.settings_before import Settings, block_size_for
from stockpot.task.order import generator


def blocks_for(settings: Settings, models: int) -> list[list[int]]:
    """Of a pool of K models."""
    size = block_size_for(settings, models)
    return schedule(models, size, passes=settings.passes, blocks=settings.blocks, seed=settings.seed)


def schedule(
    models: int, size: int, *, passes: int = 1, blocks: int | None = None, seed: int = 0
) -> list[list[int]]:
    """Shuffled passes over the pool, cut into blocks of at most `size`; indices within a block are sorted,
    so that one block of all models is the same whatever the seed."""
    wanted = blocks if blocks is not None else passes * -(-models // size)
    return list(islice(_endless(models, size, seed), wanted))


def _endless(models: int, size: int, seed: int) -> Iterator[list[int]]:
    for number in count():
        order = torch.randperm(models, generator=generator("blocks", seed, number)).tolist()
        for start in range(0, models, size):
            yield sorted(order[start : start + size])
