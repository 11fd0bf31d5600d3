"""Data that was read once and is drawn from many times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stockpot.errors import DataError, describe
from stockpot.events import Listener, ignore
from stockpot.task import folds as _folds
from stockpot.task.budget import Budget
from stockpot.task.order import order
from stockpot.task.reading import read
from stockpot.task.store import Columns, Samples

MEMORY_LIMIT = 8 * 2**30


class Data:
    """Samples in host memory, decoded and collated once.

    Made from tensors (a tuple, list or dict of them), a map-style `Dataset`, a `DataLoader` (whose order is
    ignored), or a finite iterable of batches. Uniform samples are kept as columns; samples of uneven shapes
    are kept one by one and collated per batch with the loader's `collate_fn`.
    """

    def __init__(self, store: Columns | Samples, rows: Tensor | None = None, name: str = "data") -> None:
        self._store = store
        self._rows = rows  # (n,) of the store's rows, or None for all
        self.name = name
        self._labels: Tensor | None = None
        self._labels_sought = False

    @classmethod
    def of(
        cls,
        source: Any,
        *,
        name: str = "data",
        memory_limit: int = MEMORY_LIMIT,
        memory_used: int = 0,
        workers: int = 0,
        listen: Listener = ignore,
    ) -> Data:
        if isinstance(source, Data):
            return source
        budget = Budget(name, memory_limit, memory_used)
        return cls(read(source, budget, workers=workers, listen=listen), name=name)

    def __len__(self) -> int:
        return self._store.size if self._rows is None else self._rows.numel()

    @property
    def nbytes(self) -> int:
        """Memory of the underlying samples, shared by all views of them."""
        return self._store.nbytes

    def batch(self, indices: Tensor) -> Any:
        """These samples, collated, on the host."""
        return self._store.take(indices if self._rows is None else self._rows[indices])

    def sample(self, index: int) -> Any:
        """One sample as it was read, not collated; for data without `columns`."""
        assert isinstance(self._store, Samples)
        return self._store.samples[index if self._rows is None else int(self._rows[index])]

    @property
    def columns(self) -> Any:
        """The stacked columns, all rows of them, or None for samples of uneven shapes; see `rows`."""
        return self._store.tree if isinstance(self._store, Columns) else None

    def rows(self, indices: Tensor) -> Tensor:
        """Where these samples are in `columns`."""
        return indices if self._rows is None else self._rows[indices]

    @property
    def labels(self) -> Tensor | None:
        """One class per sample, (n,), when the data has such labels."""
        if not self._labels_sought:
            found = self._store.labels()
            self._labels = found if found is None or self._rows is None else found[self._rows]
            self._labels_sought = True
        return self._labels

    def subset(self, indices: Tensor) -> Data:
        """A view of some samples; no data is copied."""
        indices = torch.as_tensor(indices, dtype=torch.long)
        if indices.numel() == 0:
            raise DataError(
                describe(
                    f"subset of {self.name}",
                    expected="at least one sample",
                    found="none",
                    fix="choose one or more indices",
                )
            )
        return Data(self._store, indices if self._rows is None else self._rows[indices], self.name)

    def order(self, seed: int, step: int, batch_size: int) -> Tensor:
        """Indices of training batch number `step`: every sample once per epoch, restartable anywhere."""
        return order(len(self), seed, step, batch_size)

    def folds(self, n: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """`n` pairs (fit, held out); every sample is held out once, stratified by class labels."""
        return _folds.folds(len(self), n, seed, self.labels, self.name)
