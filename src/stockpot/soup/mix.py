"""One tensor of a soup from the same tensor of every ingredient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stockpot.layout import mixing_dtype

# Small enough that the running sum stays in cache while K ingredients stream past it.
CHUNK = 1 << 18


def mix_tensor(parts: Sequence[Tensor], weights: Sequence[float], *, free: bool = False) -> Tensor:
    """sum_k weights[k] * parts[k] in fp32 (fp64 for fp64 parts), the shape of a part.

    Computed around the heaviest part: x + sum_k w_k (x_k - x). Since the weights sum to one this is the same number,
    but the soup of identical models is that model to the last bit, and so is a soup of one.
    """
    anchor = max(range(len(parts)), key=lambda k: abs(weights[k]))
    total = sum(weights) if free else 1.0
    others = [
        (parts[k].reshape(-1), weights[k]) for k in range(len(parts)) if k != anchor and weights[k] != 0.0
    ]
    base = parts[anchor].reshape(-1)
    dtype = mixing_dtype(base.dtype)
    out = torch.empty(base.shape, dtype=dtype)
    scratch = torch.empty(min(CHUNK, base.numel()), dtype=dtype)
    for start in range(0, base.numel(), CHUNK):
        here = slice(start, start + CHUNK)
        centre = base[here].to(dtype)
        target = out[here]
        target.copy_(centre)
        if total != 1.0:
            target.mul_(total)
        difference = scratch[: target.numel()]
        for part, weight in others:
            torch.sub(part[here].to(dtype), centre, out=difference)
            target.add_(difference, alpha=weight)
    return out.view(parts[anchor].shape)


def mix_statistic(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """A running statistic as the average of the ingredients' own.

    Extrapolating weights would give negative variances, so negative ones count as zero here.
    """
    positive = [max(0.0, weight) for weight in weights]
    total = sum(positive)
    return mix_tensor(parts, [weight / total for weight in positive])
