"""Plain features (n, ...), floating point."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

SHARE = 0.5  # of a feature's standard deviation, added as noise at strength 1


def add_noise(features: Tensor, strength: float, stream: Generator) -> Tensor:
    spread = features.std(dim=0, keepdim=True, unbiased=False)  # of each feature within the batch
    noise = torch.randn(features.shape, generator=stream, device=features.device, dtype=torch.float32)
    return features + (SHARE * strength * noise).to(features.dtype) * spread
