"""What follows from one pass over a pool: what is frozen, tied, duplicated or not finite, and distances."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stockpot.errors import PoolError, describe
from stockpot.events import Listener, ignore
from stockpot.pool.scan import Scan, TensorScan, scan
from stockpot.pool.source import Checkpoint, TensorSpec, listed, shown

_NEAR = 0.05  # of the distance that is usual


@dataclass(frozen=True)
class Distances:
    """Euclidean, over floating tensors that are neither frozen nor statistics, tied ones once.

    NaN where an ingredient is not finite.
    """

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
        if len(self.to_mean) < 4 or not bool(self.to_mean.isfinite().all()):
            return None
        quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=self.to_mean.dtype)
        low, middle, high = torch.quantile(self.to_mean, quartiles).tolist()
        k = int(self.to_mean.argmax())
        return k if float(self.to_mean[k]) > max(high + 3 * (high - low), 1.5 * middle) else None

    def near(self) -> list[tuple[int, int]]:
        """Pairs far closer to each other than is usual here: copies with rounding or a step between them."""
        places = torch.triu_indices(len(self.norms), len(self.norms), 1)
        apart = self.pairs[places[0], places[1]]
        if len(self.norms) < 3 or not bool(apart.isfinite().all()):
            return []
        usual = torch.quantile(apart, 0.75)
        return [(i, j) for i, j in places[:, (apart < _NEAR * usual)].T.tolist()]


@dataclass(frozen=True)
class PoolFacts:
    """`frozen`: names identical in all ingredients. `tied`: groups of names that are one tensor in every
    ingredient. `duplicates`: groups of ingredient indices with equal content. `nonfinite`: index of each ingredient
    with NaN or infinite weights, and what is wrong with it. Without a measuring pass it is empty, and there are
    no `distances`."""

    frozen: frozenset[str]
    tied: tuple[tuple[str, ...], ...]
    duplicates: tuple[tuple[int, ...], ...]
    digests: tuple[str, ...]
    nonfinite: Mapping[int, str]
    measured: Distances | None

    @property
    def distances(self) -> Distances:
        if self.measured is None:
            fix = "ask for pool.facts() without measured=False"
            raise PoolError.of("distances", expected="facts of a measuring pass", found="hashes only", fix=fix)
        return self.measured


_SAMPLE, _MATRICES = 1 << 20, 32  # values of one matrix of all ingredients, and matrices, that tell a stranger


def strangers_of(checkpoints: Sequence[Checkpoint], common: Mapping[str, TensorSpec]) -> list[int]:
    """Ingredients whose nearest neighbour is farther away than zero is: no two fine-tunes of one model are so.

    Models of two random starts are about 1.4 times their own length apart, fine-tunes a fraction of it. The beginnings
    of some matrices tell, so that asking costs next to nothing.
    """
    if checkpoints[0].format == "lora":
        return []  # adapters share their base
    matrices = [name for name, spec in common.items() if spec.dtype.is_floating_point and len(spec.shape) > 1]
    size, gram = _SAMPLE // len(checkpoints), torch.zeros(len(checkpoints), len(checkpoints), dtype=torch.float64)
    for name in matrices[:: len(matrices) // _MATRICES + 1]:
        rows = torch.stack([one.tensor(name).reshape(-1)[:size].double() for one in checkpoints])  # (K, size)
        if not bool((rows == rows[0]).all()):  # what is frozen tells nothing
            gram += rows @ rows.T
    own = gram.diagonal()
    apart = (own[:, None] + own - 2 * gram).clamp_min(0).sqrt()
    nearest = apart.fill_diagonal_(math.nan if len(apart) < 2 else math.inf).min(dim=1).values
    return (nearest > own.sqrt()).nonzero().flatten().tolist()  # NaN is no stranger


def facts_of(
    checkpoints: Sequence[Checkpoint], specs: Mapping[str, TensorSpec], statistics: frozenset[str], found: Scan
) -> PoolFacts:
    frozen = frozenset(name for name, tensor in found.tensors.items() if len({*tensor.values}) == 1)
    tied = _tied(checkpoints, specs, found)
    duplicates = tuple(tuple(group) for group in _groups(found.digests))
    passed_over = {*frozen, *statistics, *(name for names in tied for name in names[1:])}
    counted = [found.tensors[name] for name in specs if name not in passed_over]
    distances = _distances(found.gram, counted, duplicates) if found.measured else None
    return PoolFacts(frozen, tied, duplicates, found.digests, nonfinite(checkpoints, found), distances)


def _distances(gram: Tensor, counted: Sequence[TensorScan], duplicates: Sequence[Sequence[int]]) -> Distances:
    gram = gram + sum(tensor.gram for tensor in counted if tensor.gram is not None)  # (K, K)
    norms = sum((tensor.squares for tensor in counted), torch.zeros(len(gram), dtype=torch.float64)).sqrt()
    own = gram.diagonal()
    pairs = (own[:, None] + own[None, :] - 2 * gram).clamp_min(0).sqrt().fill_diagonal_(0.0)
    for group in duplicates:
        pairs[torch.tensor(group)[:, None], torch.tensor(group)] = 0.0  # known exactly
    # With the mean as origin, the inner product of a model with itself is its squared distance to the mean.
    to_mean = (own - gram.mean(dim=0) - gram.mean(dim=1) + gram.mean()).clamp_min(0).sqrt()
    return Distances(pairs, to_mean, norms)


def _groups(values: Sequence[Hashable]) -> list[list[int]]:
    """Positions of equal values, where there are at least two."""
    places: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        places[value].append(index)
    return [group for group in places.values() if len(group) > 1]


def _tied(
    checkpoints: Sequence[Checkpoint], specs: Mapping[str, TensorSpec], found: Scan
) -> tuple[tuple[str, ...], ...]:
    """Groups of names that are one tensor in every ingredient.

    Equal bytes alone prove little: two biases of zeros are equal by initialisation. So the names must also be
    one tensor in some file, or their content must not be one repeated value.
    """
    names = [name for name, spec in specs.items() if spec.numel]
    contents = [(tuple(c.specs[name] for c in checkpoints), found.tensors[name].stored) for name in names]
    aliased = {name: (k, g) for k, c in enumerate(checkpoints) for g, group in enumerate(c.aliases) for name in group}
    result: list[tuple[str, ...]] = []
    for positions in _groups(contents):
        group = [names[position] for position in positions]
        if not all(found.tensors[group[0]].constant):
            result.append(tuple(group))
            continue
        declared: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        for name in group:
            if name in aliased:
                declared[aliased[name]].append(name)
        result += [tuple(names) for names in declared.values() if len(names) > 1]
    return tuple(result)


def nonfinite(checkpoints: Sequence[Checkpoint], found: Scan) -> dict[int, str]:
    """The places of bad checkpoints, and what is wrong with each."""
    bad: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in found.tensors.items():
        for k in tensor.counts.sum(dim=0).nonzero().flatten().tolist():
            counts = zip(tensor.counts[:, k].tolist(), ("NaN", "infinite"), strict=True)
            text = " and ".join(f"{count} {what}" for count, what in counts if count)
            bad[k].append(f"{name} ({text} of {checkpoints[k].specs[name].numel})")
    return {
        k: describe(
            shown(checkpoints[k].path),
            expected="finite weights",
            found=f"others in {len(texts)} of its tensors: {listed(texts)}",
            fix="leave this checkpoint out of the pool (a recipe's `pool.nonfinite: drop` does);"
            " its training diverged or the file is damaged",
        )
        for k, texts in sorted(bad.items())
    }


def require_finite(checkpoints: Sequence[Checkpoint], found: Scan) -> None:
    problems = nonfinite(checkpoints, found)
    if problems:
        head = f"{len(problems)} of {len(checkpoints)} checkpoints have weights that are not finite"
        raise PoolError("\n".join((head, *problems.values())))


def verify_finite(checkpoint: Checkpoint, listen: Listener = ignore) -> None:
    """For one checkpoint that is in no pool: raise if there is a NaN or infinite weight, naming every tensor."""
    require_finite([checkpoint], scan([checkpoint], checkpoint.specs, listen))
