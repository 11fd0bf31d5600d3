"""What is not mixed: frozen, excluded and integer tensors, and running statistics."""

from __future__ import annotations

from torch import Tensor

from stockpot.layout import EXCLUDED, FROZEN, INTEGER, Layout
from stockpot.pool import Pool
from stockpot.soup.mix import mix_statistic
from stockpot.soup.weights import heaviest, single


def kept_tensor(pool: Pool, layout: Layout, W: Tensor, name: str, rule: str) -> Tensor:
    """The value of a tensor that the layout does not mix, in a soup of weights W (K, G)."""
    reason = layout.kept[name]
    if reason in (FROZEN, EXCLUDED):
        return pool.tensor(layout.donor, name)
    one = single(W)
    if one is not None:
        return pool.tensor(one, name)
    if reason == INTEGER or not pool.specs[name].dtype.is_floating_point:
        return pool.tensor(heaviest(W), name)
    if rule == "copy":
        return pool.tensor(layout.donor, name)
    return mix_statistic([pool.tensor(k, name) for k in range(len(pool))], W.mean(dim=1).tolist())
