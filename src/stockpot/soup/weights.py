"""The mixing weights W, a (K, G) matrix whose columns each sum to one, and what they make of one tensor.

Every soup is such a matrix; a method only decides its numbers. A tensor that is mixed is sum_k w_k x_k, to the last bit
the same anywhere; for tensors that are not mixed there is one rule for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from stockpot.errors import SoupError
from stockpot.layout import EXCLUDED, FROZEN, INTEGER, Layout, mixing_dtype
from stockpot.pool import Pool
from stockpot.pool.source import dtype_name

SUM_TOLERANCE = 1e-6
StatisticsRule = Literal["average", "copy", "recalibrate"]

# Torch runs an operation of this size on one thread: no barrier twice per ingredient.
CHUNK = 1 << 15
# Chunks per call: the running sum (512 KiB) stays in a core's own cache while K ingredients stream past it, and threads
# meet at the interpreter's lock a quarter as often.
GROUP = 4
# Where many cores have nothing else to do: torch's own threads share one operation, each with its own part of the sum.
WIDE = 1 << 21
GAIN = 4.0  # positive weights may add up to this; what negative ones take back multiplies the rounding before them


def uniform(models: int, groups: int) -> Tensor:
    return torch.full((models, groups), 1.0 / models, dtype=torch.float64)


def chosen(models: int, groups: int, rows: Iterable[int]) -> Tensor:
    """1/n on the n chosen rows: one row is the best individual, several are a greedy soup."""
    picked = list(rows)
    W = torch.zeros(models, groups, dtype=torch.float64)
    W[picked] = 1.0 / len(picked)
    return W


def check(W: Tensor, models: int, groups: int) -> Tensor:
    if tuple(W.shape) != (models, groups):
        expected = f"a matrix of {models} ingredients x {groups} groups"
        fix = "make one row per ingredient of the pool and one column per group of the layout"
        raise SoupError.of("mixing weights", expected=expected, found=f"shape {tuple(W.shape)}", fix=fix)
    W = W.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(W).all()):
        fix = "lower the learning rate; a soup is never saved so"
        raise SoupError.of("mixing weights", "finite numbers", f"{int((~torch.isfinite(W)).sum())} NaN or Inf", fix)
    worst = float((W.sum(dim=0) - 1.0).abs().max())
    # Weights that are large and cancel are rounded in proportion.
    if worst > SUM_TOLERANCE * max(1.0, float(W.abs().max())):
        found, fix = f"a column off by {worst:.3g}", "divide each column by its sum"
        raise SoupError.of("mixing weights", expected="columns that sum to one", found=found, fix=fix)
    return W


def heaviest(W: Tensor) -> int:
    """The ingredient with the largest mean weight; the first of equals."""
    return int(W.mean(dim=1).argmax())


def single(W: Tensor) -> int | None:
    """The one ingredient a soup consists of, if it does."""
    rows = torch.nonzero((W != 0).any(dim=1)).flatten().tolist()
    return int(rows[0]) if len(rows) == 1 and bool((W[rows[0]] == 1).all()) else None


# ---- one tensor of a soup from the same tensor of every ingredient


def mix_tensor(
    parts: Sequence[Tensor], weights: Sequence[float], *, wide: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """sum_k weights[k] * parts[k] in fp32 (fp64 for fp64 parts), the shape of a part. The weights sum to one.

    With `dtype` the sum is rounded to it once, at the end of every piece: no more than a piece is ever in fp32.

    Computed from the heaviest part by differences: since the weights sum to one this is the same number, but the
    soup of identical models is that model to the last bit, and so is a soup of one. `wide`, for many cores, changes
    no bit either: every operation is elementwise.
    """
    anchor = max(range(len(parts)), key=lambda k: abs(weights[k]))
    others = [(parts[k].reshape(-1), weights[k]) for k in range(len(parts)) if k != anchor and weights[k] != 0.0]
    base = parts[anchor].reshape(-1)
    out = torch.empty(base.shape, dtype=dtype or mixing_dtype(base.dtype))
    gain = sum(weight for weight in weights if weight > 0)
    if weights[anchor] > 0 and gain <= GAIN:
        # The negative ones last: so no partial sum of the weights comes near zero.
        ordered = sorted(others, key=lambda other: other[1] < 0)
        _running_mean(out, base, ordered, weights[anchor], *((WIDE, 1) if wide else (CHUNK, GROUP)))
    else:
        _extrapolate(out, base, others, WIDE if wide else CHUNK)
    return out.view(parts[anchor].shape)


def _running_mean(
    out: Tensor, base: Tensor, others: list[tuple[Tensor, float]], weight: float, size: int, group: int
) -> None:
    """The weighted mean of the parts so far, part after part: one fused operation for each."""
    shares = []
    total = weight
    for _, weight in others:
        total += weight
        shares.append(weight / total)
    exact = mixing_dtype(base.dtype)
    sums = [torch.empty(min(size, base.numel()), dtype=exact) for _ in range(group)] if out.dtype != exact else None
    pieces = [torch.split(x, size) for x in (out, base, *(part for part, _ in others))]
    for at in range(0, len(pieces[0]), group):
        target, first, *rest = (chunks[at : at + group] for chunks in pieces)
        running = target if sums is None else [row[: len(one)] for row, one in zip(sums, target, strict=False)]
        torch._foreach_copy_(running, first)
        for chunks, share in zip(rest, shares, strict=True):
            torch._foreach_lerp_(running, [_as(chunk, exact) for chunk in chunks], share)
        if sums is not None:
            torch._foreach_copy_(target, running)


def _extrapolate(out: Tensor, base: Tensor, others: list[tuple[Tensor, float]], size: int) -> None:
    """x + sum_k w_k (x_k - x), for weights of any sign."""
    exact = mixing_dtype(base.dtype)
    scratch, sums = torch.empty(2, min(size, base.numel()), dtype=exact)
    weights = [weight for _, weight in others]
    pieces = zip(*(torch.split(x, size) for x in (out, base, *(part for part, _ in others))), strict=True)
    for target, first, *rest in pieces:
        centre = _as(first, exact)
        difference, total = scratch[: target.numel()], sums[: target.numel()]
        total.copy_(centre)
        for piece, weight in zip(rest, weights, strict=True):
            torch.sub(_as(piece, exact), centre, out=difference)
            total.add_(difference, alpha=weight)
        target.copy_(total)


def _as(piece: Tensor, dtype: torch.dtype) -> Tensor:
    return piece if piece.dtype == dtype else piece.to(dtype)


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
    return mix_tensor([pool.tensor(k, name) for k in range(len(pool))], statistics_weights(W))


def statistics_weights(W: Tensor) -> list[float]:
    """How much of each ingredient is in averaged statistics. (K,)

    Extrapolating weights would give negative variances, so negative ones count as zero.
    """
    positive = [max(0.0, weight) for weight in W.mean(dim=1).tolist()]
    total = sum(positive)
    return [weight / total for weight in positive]


def check_holds(mixed: Tensor, name: str, dtype: torch.dtype) -> None:
    """A soup is never written with a value that is not finite, or that its type cannot hold."""
    if not mixed.numel():
        return
    # NaN if there is one. Of float8 torch finds no ends.
    ends = torch.stack(torch.aminmax(mixed.float() if mixed.dtype.itemsize == 1 else mixed))
    limit = torch.finfo(dtype).max * (1 + torch.finfo(dtype).eps / 4)  # some float8 round all above to their largest
    if bool(ends.to(dtype).to(ends.dtype).isfinite().all()) and float(ends.abs().max()) <= limit:
        return
    expected, found = "finite values", "NaN or infinity"
    fix = "leave out ingredients whose weights are not finite (Pool.verify_finite names them,"
    fix += " Pool.drop_nonfinite leaves them out; in a recipe, pool.nonfinite: drop), or lower lr"
    if bool(ends.isfinite().all()):
        expected = f"values that {dtype_name(dtype)} can hold, up to {torch.finfo(dtype).max:g}"
        found = f"one of {float(ends.abs().max()):g}"
        fix = "lower lr so that the mixing weights stay small, or store the soup in a wider type"
        fix += " (Soup.save(dtype=torch.float32))"
    raise SoupError.of(f"soup tensor {name}", expected=expected, found=found, fix=fix)
