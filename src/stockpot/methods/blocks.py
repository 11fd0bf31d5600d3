"""Which models are loaded together, and in which order: a pure function of seed, K, b and T."""

from __future__ import annotations

import torch

from stockpot.task.order import generator


def schedule(
    models: int, size: int, *, passes: int = 1, blocks: int | None = None, seed: int = 0
) -> list[list[int]]:
    """Shuffled passes over the pool, cut into blocks of at most `size`; indices within a block are sorted,
    so that one block of all models is the same whatever the seed."""
    per_pass = -(-models // size)
    wanted = blocks if blocks is not None else passes * per_pass
    out: list[list[int]] = []
    for number in range(-(-wanted // per_pass)):
        order = torch.randperm(models, generator=generator("blocks", seed, number)).tolist()
        out += [sorted(order[start : start + size]) for start in range(0, models, size)]
    return out[:wanted]
