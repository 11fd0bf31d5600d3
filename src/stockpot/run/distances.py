"""How far ingredients lie from each other in weight space: one streaming pass, every pair."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stockpot.events import Listener, ignore, progress
from stockpot.layout import Layout
from stockpot.pool import Pool

CHUNK = 1 << 16  # elements of each ingredient held at a time


@dataclass(frozen=True)
class Distances:
    """Euclidean, over mixed tensors (tied ones once). NaN where an ingredient is not finite."""

    pairs: Tensor  # (K, K) float64
    to_mean: Tensor  # (K,) float64
    norms: Tensor  # (K,) float64: of the weights themselves, the scale that distances are to be seen on

    def outlier(self) -> int | None:
        """The ingredient whose distance to the mean stands out; None when none does.

        By Tukey's fence, 3 interquartile ranges above the upper quartile, and by at least a half: pools whose
        ingredients are all equally far apart have no outlier however narrow their quartiles are.
        """
        unsound = (~self.norms.isfinite()).nonzero()  # one of these, and nobody has a distance to the mean
        if len(unsound):
            return int(unsound[0])
        finite = self.to_mean
        if len(finite) < 4 or not bool(finite.isfinite().all()):
            return None
        low, middle, high = torch.quantile(
            finite, torch.tensor([0.25, 0.5, 0.75], dtype=finite.dtype)
        ).tolist()
        k = int(finite.argmax())
        return k if float(finite[k]) > max(high + 3 * (high - low), 1.5 * middle) else None

    def strangers(self) -> list[int]:
        """Ingredients whose nearest neighbour is farther away than zero is: no two fine-tunes of one model are so.

        Models of two random starts are about 1.4 times their own length apart, fine-tunes a fraction of it.
        """
        if len(self.norms) < 2:
            return []
        nearest = (self.pairs + torch.diag(torch.full_like(self.norms, math.inf))).min(dim=1).values
        return (nearest > self.norms).nonzero().flatten().tolist()  # NaN is no stranger


def distances(pool: Pool, layout: Layout, listen: Listener = ignore) -> Distances:
    """From the Gram matrix of the *centred* ingredients in fp64.

    Fine-tunes of one model are close to each other and far from zero; centring first is what keeps the subtraction
    in |x|^2 + |y|^2 - 2<x, y> from losing digits.
    """
    K = len(pool)
    gram = torch.zeros(K, K, dtype=torch.float64)
    lengths = torch.zeros(K, dtype=torch.float64)
    first_of = {name: names[0] for names in layout.tied for name in names}
    names = [name for name in layout.group_of if first_of.get(name, name) == name]
    total = sum(pool.specs[name].nbytes for name in names) * K
    done = 0
    for name in names:
        parts = [_real(pool.tensor(k, name)) for k in range(K)]
        for start in range(0, parts[0].numel(), CHUNK):
            rows = torch.stack([part[start : start + CHUNK].double() for part in parts])  # (K, chunk)
            lengths += rows.square().sum(dim=1)
            rows -= rows.mean(dim=0, keepdim=True)
            gram.addmm_(rows, rows.T)
        done += pool.specs[name].nbytes * K
        progress(listen, "measuring distances", done, total)
    norms = gram.diagonal()  # (K,) squared distances to the mean
    squared = norms[:, None] + norms[None, :] - 2 * gram
    pairs = squared.clamp_min(0).sqrt().fill_diagonal_(0.0)
    for group in pool.facts(listen).duplicates:
        for i in group:
            for j in group:
                pairs[i, j] = 0.0  # known exactly
    return Distances(pairs, norms.clamp_min(0).sqrt(), lengths.sqrt())


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
