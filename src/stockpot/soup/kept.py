"""The tensors of a soup that are not mixed, and the one rule for each of them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from stockpot.layout import EXCLUDED, FROZEN, INTEGER, Layout
from stockpot.pool import Pool
from stockpot.soup.mix import mix_tensor
from stockpot.soup.weights import heaviest, single

StatisticsRule = Literal["average", "copy", "recalibrate"]


def kept_tensor(pool: Pool, layout: Layout, W: Tensor, name: str, rule: StatisticsRule) -> Tensor:
    """What a soup of weights W (K, G) has under this name.

    - frozen, excluded: the donor's. A frozen tensor is the same in all ingredients.
    - integers and booleans: the heaviest ingredient's, never an average.
    - running statistics: with one ingredient, its own. Otherwise "copy" takes the donor's, and "average" the weighted
      average, which is also what "recalibrate" begins with.
    """
    reason = layout.kept[name]
    if reason in (FROZEN, EXCLUDED):
        return pool.tensor(layout.donor, name)
    if reason == INTEGER or not pool.specs[name].dtype.is_floating_point:
        return pool.tensor(heaviest(W), name)
    only = single(W)
    if only is not None or rule == "copy":
        return pool.tensor(layout.donor if only is None else only, name)
    # Extrapolating weights would give negative variances, so negative ones count as zero.
    positive = [max(0.0, weight) for weight in W.mean(dim=1).tolist()]  # (K,)
    total = sum(positive)
    parts = [pool.tensor(k, name) for k in range(len(pool))]
    return mix_tensor(parts, [weight / total for weight in positive])
