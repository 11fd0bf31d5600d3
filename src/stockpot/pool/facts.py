"""What the ingredients have in common, byte for byte."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stockpot.pool.checkpoint import Checkpoint
from stockpot.pool.content import Hashes, digest, hash_tensor, raw_bytes
from stockpot.pool.spec import TensorSpec

_CHUNK = 2**20  # elements compared at a time


@dataclass(frozen=True)
class PoolFacts:
    """`frozen`: names identical in all ingredients. `tied`: groups of names that are one tensor in every
    ingredient. `duplicates`: groups of ingredient indices with equal content."""

    frozen: frozenset[str]
    tied: tuple[tuple[str, ...], ...]
    duplicates: tuple[tuple[int, ...], ...]
    digests: tuple[str, ...]
    distances: Any = None


def gather_facts(
    checkpoints: Sequence[Checkpoint],
    specs: Mapping[str, TensorSpec],
    hashes: Sequence[Hashes],
    tensor: Callable[[int, str], Tensor],
) -> PoolFacts:
    digests = tuple(
        digest(checkpoint.specs, table) for checkpoint, table in zip(checkpoints, hashes, strict=True)
    )
    return PoolFacts(
        frozen=frozenset(name for name in specs if _frozen(name, checkpoints, hashes, tensor)),
        tied=_tied(checkpoints, specs, hashes, tensor),
        duplicates=tuple(tuple(group) for group in _groups(digests)),
        digests=digests,
    )


def _groups(values: Sequence[object]) -> list[list[int]]:
    """Positions of equal values, where there are at least two."""
    places: defaultdict[object, list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        places[value].append(index)
    return [group for group in places.values() if len(group) > 1]


def _frozen(
    name: str,
    checkpoints: Sequence[Checkpoint],
    hashes: Sequence[Hashes],
    tensor: Callable[[int, str], Tensor],
) -> bool:
    if len({checkpoint.specs[name].dtype for checkpoint in checkpoints}) > 1:
        # In a pool of mixed dtypes the same values have different bytes: compare what the pool hands out.
        first = hash_tensor(tensor(0, name))
        return all(hash_tensor(tensor(k, name)) == first for k in range(1, len(checkpoints)))
    return len({table[name] for table in hashes}) == 1


def _tied(
    checkpoints: Sequence[Checkpoint],
    specs: Mapping[str, TensorSpec],
    hashes: Sequence[Hashes],
    tensor: Callable[[int, str], Tensor],
) -> tuple[tuple[str, ...], ...]:
    """Groups of names that are one tensor in every ingredient.

    Equal bytes alone prove little: two biases of zeros are equal by initialisation. So the names must also be
    one tensor in some file, or their content must not be one repeated value.
    """
    names = [name for name, spec in specs.items() if spec.numel]
    keys = [
        (tuple(checkpoint.specs[name] for checkpoint in checkpoints), tuple(table[name] for table in hashes))
        for name in names
    ]
    aliased = {
        name: (k, g) for k, c in enumerate(checkpoints) for g, group in enumerate(c.aliases) for name in group
    }
    result: list[tuple[str, ...]] = []
    for positions in _groups(keys):
        group = [names[position] for position in positions]
        if not all(_constant(tensor(k, group[0])) for k in range(len(checkpoints))):
            result.append(tuple(group))
            continue
        declared: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        for name in group:
            if name in aliased:
                declared[aliased[name]].append(name)
        result += [tuple(names) for names in declared.values() if len(names) > 1]
    return tuple(result)


def _constant(tensor: Tensor) -> bool:
    rows = raw_bytes(tensor).view(tensor.numel(), -1)  # (elements, bytes of one)
    return all(bool((rows[start : start + _CHUNK] == rows[0]).all()) for start in range(0, len(rows), _CHUNK))
