"""The mean of what an optimiser's steps had: less noisy than where the last one ended."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Trail:
    """Sums over the steps taken since `begin`, on the device and in place: a captured graph may add to them."""

    def __init__(self, raw: Tensor, temperature: Tensor | None) -> None:
        self._followed = [raw] if temperature is None else [raw, temperature]
        self._one = torch.ones((), dtype=raw.dtype, device=raw.device)
        self.totals = [torch.zeros_like(one, requires_grad=False) for one in [*self._followed, self._one]]

    def begin(self) -> None:
        for total in self.totals:
            total.zero_()

    def add(self, skipped: Tensor | None = None) -> None:
        """One step; nothing where this number on the device is not zero."""
        with torch.no_grad():
            for total, value in zip(self.totals, [*self._followed, self._one], strict=True):
                total.add_(
                    value if skipped is None else torch.where(skipped > 0, torch.zeros_like(value), value)
                )

    def mean(self) -> tuple[Tensor, float | None]:
        """Coefficients, (b, G), and temperature; as they are where no step was taken."""
        *sums, count = self.totals
        found = [one / count for one in sums] if count else [one.detach().clone() for one in self._followed]
        return found[0], float(found[1]) if len(found) > 1 else None

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for place, total in enumerate(self.totals):
            total.copy_(tensors[f"trail.{place}"])
