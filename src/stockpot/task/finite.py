"""Numbers in the data that would make every loss they take part in worthless."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.errors import DataError, describe
from stockpot.task.data import Data
from stockpot.task.outputs import find_labels
from stockpot.task.tree import leaves

_PIECE = 1024  # samples looked at together


def check_finite(data: Data, *, labels: bool) -> None:
    """Refuse NaN and infinity, naming the first sample. Minus infinity is let through: additive masks are made of it.

    Without `labels` those may hold anything: a loss of the user's own may take NaN for "not known".
    """
    bad: list[int] = []
    where, value = "", 0.0
    for start, path, rows in _parts(data, labels):
        wrong = torch.isnan(rows) | (rows == torch.inf)
        found = wrong.reshape(len(rows), -1).any(dim=1).nonzero().flatten() + start
        if not bad and len(found):
            where, value = path, float(rows[wrong][0])
        bad += found.tolist()
    if bad:
        samples = sorted(set(bad))
        raise DataError(
            describe(
                f"{data.name}{where and f', batch{where}'}",
                expected="finite numbers",
                found=f"{value} in sample {samples[0]} ({len(samples)} of {len(data)} samples have such)",
                fix="repair these samples or leave them out; a division by zero in preprocessing is a usual cause",
            )
        )


def _parts(data: Data, labels: bool) -> Iterator[tuple[int, str, Tensor]]:
    """Stretches of real numbers: the first sample, the place in the batch, one row for each sample."""
    columns = data.columns
    for start in range(0, len(data), _PIECE):
        indices = torch.arange(start, min(start + _PIECE, len(data)))
        if columns is None:
            for index in indices.tolist():
                for path, leaf in _reals(data.sample(index), labels):
                    yield index, path, leaf[None]
        else:
            rows = data.rows(indices)
            for path, column in _reals(columns, labels):
                yield start, path, column[rows]


def _reals(tree: Any, labels: bool) -> Iterator[tuple[str, Tensor]]:
    skipped = None if labels else find_labels(tree)
    for path, leaf in leaves(tree):
        if skipped is not None and leaf is skipped:
            continue
        if isinstance(leaf, (float, np.ndarray, np.floating)):
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind != "f":
                continue
            leaf = torch.as_tensor(leaf)
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield path, leaf
