"""From what the optimiser moves (raw) to how far each direction is followed (coefficients), and gradients back.

Both parametrisations write the soup as centre + sum_k c_k d_k. On the hyperplane c is raw itself. On the simplex
c is the softmax of raw over the models, and since it sums to one, following theta_k - mean is the same as mixing
the theta_k: the softmax's Jacobian removes the part of the gradient that all models share.
"""

from __future__ import annotations

import torch
from torch import Tensor


def coefficients(raw: Tensor, simplex: bool) -> Tensor:
    """raw: (b, G) -> c: (b, G)"""
    return torch.softmax(raw, dim=0) if simplex else raw


def pull_back(raw: Tensor, gradient: Tensor, simplex: bool) -> Tensor:
    """Gradient of the loss by raw from its gradient by c. Both (b, G)."""
    if not simplex:
        return gradient
    c = torch.softmax(raw, dim=0)
    return c * (gradient - (c * gradient).sum(dim=0, keepdim=True))
