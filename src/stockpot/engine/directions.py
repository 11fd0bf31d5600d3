"""The loaded block: directions theta_k - centre of b ingredients, resident on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from stockpot.engine.plan import FlatPlan


class Directions:
    """b rows of length P and the two operations learning needs of them.

    `scale` (b, G) multiplies row k in group j; it is 1 except when directions are scaled to unit norm.
    """

    def __init__(self, rows: Tensor, plan: FlatPlan, *, unit_norm: bool = False) -> None:
        self.rows = rows  # (b, P)
        self.plan = plan
        self.scale: Tensor | None = self._inverse_norms() if unit_norm else None  # (b, G)

    def project(self, gradient: Tensor) -> Tensor:
        """(P,) -> (b, G); see engine/reference.py."""
        out = torch.empty(self.rows.shape[0], self.plan.groups, dtype=gradient.dtype, device=gradient.device)
        for j, (start, stop) in enumerate(self.plan.bounds):
            torch.mv(self.rows[:, start:stop], gradient[start:stop], out=out[:, j])
        return out if self.scale is None else out.mul_(self.scale)

    def mix(self, fixed: Tensor, coefficients: Tensor, out: Tensor) -> None:
        """out = fixed + sum_k coefficients[k, group] * direction_k. fixed, out: (P,); coefficients: (b, G)."""
        weights = coefficients if self.scale is None else coefficients * self.scale
        for j, (start, stop) in enumerate(self.plan.bounds):
            torch.addmv(fixed[start:stop], self.rows[:, start:stop].T, weights[:, j], out=out[start:stop])

    def _inverse_norms(self) -> Tensor:
        norms = torch.stack([self.rows[:, start:stop].norm(dim=1) for start, stop in self.plan.bounds], dim=1)
        # A direction of length zero (an ingredient equal to the centre there) stays zero.
        return torch.where(
            norms > 0, 1.0 / norms.clamp_min(torch.finfo(norms.dtype).tiny), torch.zeros_like(norms)
        )
