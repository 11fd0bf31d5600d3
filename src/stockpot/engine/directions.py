"""The loaded block: directions theta_k - centre of b ingredients, resident on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from stockpot.engine.plan import FlatPlan
from stockpot.engine.tiles import Tiles


class Directions:
    """b rows of length P and the two operations learning needs of them.

    Rows are fp32 (fp64), or rounded to bf16, or to int8 with one scale per model and tile. `scale` (b, G) multiplies
    row k in group j; it is None except when directions are scaled to unit norm. On a CUDA device the operations are
    the kernels of engine/kernels.py; elsewhere they are plain PyTorch.
    """

    def __init__(
        self,
        rows: Tensor,
        plan: FlatPlan,
        *,
        unit_norm: bool = False,
        tiles: Tiles | None = None,
        tile_scale: Tensor | None = None,  # (tiles, b) fp32, for int8
    ) -> None:
        self.rows = rows  # (b, P)
        self.plan = plan
        self.tiles = tiles
        self.tile_scale = tile_scale
        self.fast = rows.is_cuda and tiles is not None and rows.dtype != torch.float64
        self.scale: Tensor | None = self._inverse_norms() if unit_norm else None  # (b, G)

    def project(self, gradient: Tensor) -> Tensor:
        """(P,) -> (b, G); see engine/reference.py."""
        if self.fast:
            from stockpot.engine import kernels

            assert self.tiles is not None
            out = kernels.project(self.rows, gradient, self.tiles, self.tile_scale)
        else:
            dtype = gradient.dtype
            out = torch.empty(self.rows.shape[0], self.plan.groups, dtype=dtype, device=gradient.device)
            for j, (start, stop) in enumerate(self.plan.bounds):
                torch.mv(self._decoded(j, dtype), gradient[start:stop], out=out[:, j])
        return out if self.scale is None else out.mul_(self.scale)

    def mix(self, fixed: Tensor, coefficients: Tensor, out: Tensor) -> None:
        """out = fixed + sum_k coefficients[k, group] * direction_k. fixed, out: (P,); coefficients: (b, G)."""
        weights = coefficients if self.scale is None else coefficients * self.scale
        if self.fast:
            from stockpot.engine import kernels

            assert self.tiles is not None
            kernels.mix(self.rows, fixed, weights.float().contiguous(), out, self.tiles, self.tile_scale)
            return
        for j, (start, stop) in enumerate(self.plan.bounds):
            rows = self._decoded(j, fixed.dtype)
            if out.dtype == fixed.dtype:
                torch.addmv(fixed[start:stop], rows.T, weights[:, j], out=out[start:stop])
            else:
                out[start:stop] = torch.addmv(fixed[start:stop], rows.T, weights[:, j])

    def part(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """A stretch of whole tensors in the dtype of the sum; a view when nothing was rounded. (b, n)"""
        rows = self.rows[:, start:stop].to(dtype)
        if self.tile_scale is None or self.tiles is None:
            return rows
        ends = torch.tensor([start, stop], device=self.tiles.start.device)
        first, last = torch.searchsorted(self.tiles.start, ends).tolist()
        factors = self.tile_scale[first:last].repeat_interleave(self.tiles.length[first:last].long(), dim=0)
        return rows * factors[: stop - start].T.to(dtype)

    def _decoded(self, j: int, dtype: torch.dtype) -> Tensor:
        """Group j's directions. (b, n)"""
        return self.part(*self.plan.bounds[j], dtype)

    def _inverse_norms(self) -> Tensor:
        dtype = (
            torch.promote_types(self.rows.dtype, torch.float32)
            if self.rows.is_floating_point()
            else torch.float32
        )
        norms = torch.stack([self._decoded(j, dtype).norm(dim=1) for j in range(self.plan.groups)], dim=1)
        # A direction of length zero (an ingredient equal to the centre there) stays zero.
        tiny = torch.finfo(norms.dtype).tiny
        return torch.where(norms > 0, 1.0 / norms.clamp_min(tiny), torch.zeros_like(norms))
