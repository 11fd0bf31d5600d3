"""What `project` and `mix` mean, in the paper's notation. Faster code is checked against this file.

Directions D are (b, P): row k holds theta_k - mean, flat. `bounds[j]` is the stretch of the flat vector that belongs to
coefficient group j. The two operations are adjoint: <mix(a), g> = <a, project(g)>.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Bounds = Sequence[tuple[int, int]]


def project(directions: Tensor, gradient: Tensor, bounds: Bounds) -> Tensor:
    """grad a[k, j] = sum over tensors l in group j of <g[l], d_k[l]> (paper, eq. 6).

    directions: (b, P), gradient: (P,) -> (b, G)
    """
    out = torch.empty(directions.shape[0], len(bounds), dtype=gradient.dtype, device=gradient.device)
    for j, (start, stop) in enumerate(bounds):
        out[:, j] = directions[:, start:stop].to(gradient.dtype) @ gradient[start:stop]
    return out


def mix(directions: Tensor, coefficients: Tensor, bounds: Bounds) -> Tensor:
    """sum_k a[k, group(l)] d_k[l], flat (paper, Algorithm 1, line 9 without theta_fix).

    directions: (b, P), coefficients: (b, G) -> (P,)
    """
    out = torch.empty(directions.shape[1], dtype=coefficients.dtype, device=coefficients.device)
    for j, (start, stop) in enumerate(bounds):
        out[start:stop] = coefficients[:, j] @ directions[:, start:stop].to(coefficients.dtype)
    return out
