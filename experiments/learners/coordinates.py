"""What the optimiser moves, and how the coefficients follow from it. All maps are linear."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Plain:
    """z = a."""

    def start(self, a: Tensor) -> Tensor:
        return a.clone()

    def to_a(self, z: Tensor) -> Tensor:
        return z

    def pull(self, slope: Tensor) -> Tensor:
        """The gradient in z from that in a."""
        return slope


class Grouped(Plain):
    """One coefficient for several groups: a coarser granularity."""

    def __init__(self, members: Sequence[int], device: torch.device) -> None:
        self._member = torch.tensor(list(members), device=device)  # (G,) which coarse group a group is in
        self._count = int(self._member.max()) + 1

    def start(self, a: Tensor) -> Tensor:
        total = torch.zeros(a.shape[0], self._count, device=a.device).index_add_(1, self._member, a)
        sizes = torch.bincount(self._member, minlength=self._count)
        return total / sizes

    def to_a(self, z: Tensor) -> Tensor:
        return z[:, self._member]

    def pull(self, slope: Tensor) -> Tensor:
        return torch.zeros(slope.shape[0], self._count, device=slope.device).index_add_(
            1, self._member, slope
        )


class Eigenbasis(Plain):
    """Coordinates in which all directions of a group are orthogonal and equally long in weight space."""

    def __init__(self, gram: Tensor, floor: float = 1e-3) -> None:
        values, vectors = torch.linalg.eigh(gram.double())  # (G, K), (G, K, K)
        typical = values.mean(dim=1, keepdim=True)
        kept = values > floor * values.amax(dim=1, keepdim=True)  # the mean's own direction has length zero
        scale = torch.where(kept, (typical / values.clamp_min(1e-30)).sqrt(), torch.zeros_like(values))
        self._map: Tensor = (vectors * scale.unsqueeze(1)).float()  # (G, K, K): a = map z

    def start(self, a: Tensor) -> Tensor:
        return _columns(torch.linalg.pinv(self._map), a).contiguous()

    def to_a(self, z: Tensor) -> Tensor:
        return _columns(self._map, z)

    def pull(self, slope: Tensor) -> Tensor:
        return _columns(self._map.mT, slope)


def _columns(matrices: Tensor, values: Tensor) -> Tensor:
    """Each group's matrix times its column: (G, K, K), (K, G) -> (K, G)."""
    return torch.einsum("gij,jg->ig", matrices, values)
