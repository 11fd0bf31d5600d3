"""The two forms in which data is kept in host memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.errors import DataError
from stockpot.task.batches import find_labels, leaves, map_tensors, map_tree, refill


class Columns:
    """A tree of tensors with one row per sample. A batch is a gather."""

    def __init__(self, tree: Any, size: int) -> None:
        self.tree = tree
        self.size = size

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for _, column in leaves(self.tree))

    def take(self, rows: Tensor) -> Any:
        return map_tensors(lambda column: column[rows], self.tree)

    def targets(self) -> Tensor | None:
        found = find_labels(self.tree)
        return found if isinstance(found, Tensor) else None


class Samples:
    """Decoded samples of uneven shapes, collated anew for each batch."""

    def __init__(self, samples: Sequence[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.samples = samples
        self.collate = collate

    @property
    def size(self) -> int:
        return len(self.samples)

    @property
    def nbytes(self) -> int:
        return sum(sample_nbytes(sample) for sample in self.samples)

    def take(self, rows: Tensor) -> Any:
        return self.collate([self.samples[row] for row in rows.tolist()])

    def targets(self) -> Tensor | None:
        found = [find_labels(sample) for sample in self.samples]
        if all(isinstance(label, (int, float, np.number)) and not isinstance(label, bool) for label in found):
            return torch.tensor(found)
        if all(isinstance(label, Tensor) and label.shape == found[0].shape for label in found):
            return torch.stack(found)
        return None


class UnevenError(Exception):
    """Batches do not stack into columns: where, what the first one had, what this one has."""

    def __init__(self, where: str, expected: str, found: str) -> None:
        super().__init__(where, expected, found)
        self.where, self.expected, self.found = where, expected, found


class Builder:
    """Stacks batches into columns, growing in place so that data is never held twice for long."""

    def __init__(self, name: str, *, rows: int | None = None, batches: int | None = None) -> None:
        self.name = name
        self.rows = 0
        self.row_nbytes = 0
        self._expected_rows = rows
        self._expected_batches = batches
        self._capacity = 0
        self._first: Any = None
        self._buffers: list[Tensor] = []

    def add(self, batch: Any) -> None:
        batch = as_tensors(batch)
        size = batch_length(batch, f"a batch of {self.name}")
        parts = list(leaves(batch))
        if self._first is None:
            self._first = map_tensors(lambda leaf: leaf[:0], batch)
            self._capacity = self._expected_rows or max(size, 1) * (self._expected_batches or 1)
            # Untouched pages of an empty tensor cost nothing, so room for all rows is free until used.
            self._buffers = [torch.empty((self._capacity, *leaf.shape[1:]), dtype=leaf.dtype) for _, leaf in parts]
            self.row_nbytes = sum(leaf.element_size() * math.prod(leaf.shape[1:]) for _, leaf in parts)
        expected = list(leaves(self._first))
        if [path for path, _ in parts] != [path for path, _ in expected]:
            raise UnevenError("batches", _paths(expected), _paths(parts))
        for (path, like), (_, leaf) in zip(expected, parts, strict=True):
            if leaf.shape[1:] != like.shape[1:] or leaf.dtype != like.dtype:
                raise UnevenError(f"batch{path}", _row(like), _row(leaf))
        while self.rows + size > self._capacity:
            self._grow(2 * self._capacity)
        for buffer, (_, leaf) in zip(self._buffers, parts, strict=True):
            buffer[self.rows : self.rows + size] = leaf
        self.rows += size

    def _grow(self, capacity: int) -> None:
        for index, old in enumerate(self._buffers):
            new = torch.empty((capacity, *old.shape[1:]), dtype=old.dtype)
            new[: self.rows] = old[: self.rows]
            self._buffers[index] = new
        self._capacity = capacity

    def finish(self) -> Columns:
        return Columns(refill(self._first, (buffer[: self.rows] for buffer in self._buffers)), self.rows)


def _paths(parts: list[tuple[str, Any]]) -> str:
    return "the parts " + ", ".join(path or "(a tensor)" for path, _ in parts)


def _row(leaf: Tensor) -> str:
    return f"{tuple(leaf.shape[1:])} {str(leaf.dtype).removeprefix('torch.')} per sample"


def as_tensors(tree: Any) -> Any:
    """Arrays become tensors; tensors come to the host without their graph."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            return torch.from_numpy(np.array(leaf) if not leaf.flags.writeable else leaf)
        return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf

    return map_tree(convert, tree)


def batch_length(tree: Any, subject: str) -> int:
    """The common first dimension of all tensors of a batch."""
    lengths = {}
    for path, leaf in leaves(tree):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            shown = "a tensor without dimensions" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise DataError.of(
                f"{subject}{path}",
                expected="a tensor with one row per sample",
                found=shown,
                fix="give tensors, or a map-style Dataset, or a DataLoader with a collate_fn",
            )
        lengths[path] = leaf.shape[0]
    if not lengths:
        raise DataError.of(
            subject, expected="at least one tensor", found="none", fix="give (inputs, labels), or a dict of tensors"
        )
    if len(set(lengths.values())) > 1:
        raise DataError.of(
            subject,
            expected="the same number of rows in every tensor",
            found=", ".join(f"{path}: {length}" for path, length in lengths.items()),
            fix="make the first dimension of every tensor the sample",
        )
    return next(iter(lengths.values()))


def sample_nbytes(sample: Any) -> int:
    """What a decoded sample takes in memory, near enough to keep a limit."""
    if isinstance(sample, (Tensor, np.ndarray)):
        return int(sample.nbytes)
    if isinstance(sample, Mapping):
        return sum(sample_nbytes(value) for value in sample.values())
    if isinstance(sample, (tuple, list)):
        return sys.getsizeof(sample) + sum(sample_nbytes(value) for value in sample)
    return sys.getsizeof(sample)
