"""Data that was read once and is drawn from many times."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.errors import DataError, TaskError
from stockpot.events import Listener, ignore
from stockpot.task.batches import leaves
from stockpot.task.metric import Benchmark, Metric
from stockpot.task.read_data import Columns, Reader, Samples

MEMORY_LIMIT = 8 * 2**30
_PIECE = 1024  # samples hashed at a time


class Data:
    """Samples in host memory, decoded and collated once.

    Made from tensors (a tuple, list or dict of them), a map-style `Dataset`, a `DataLoader` (whose order is
    ignored), or a finite iterable of batches. Uniform samples are kept as columns; samples of uneven shapes
    are kept one by one and collated per batch with the loader's `collate_fn`. Samples that belong together (of one
    patient, document or speaker) have the same number in `groups`: folds never divide a group, and scores count
    groups as their independent units.
    """

    def __init__(
        self, store: Columns | Samples, rows: Tensor | None = None, name: str = "data", groups: Tensor | None = None
    ) -> None:
        self._store = store
        self._rows = rows  # (n,) of the store's rows, or None for all
        self.name = name
        self.groups = groups  # (n,) int64 from 0, or None where every sample stands for itself

    @classmethod
    def of(
        cls,
        source: Any,
        *,
        groups: Any = None,
        name: str = "data",
        memory_limit: int = MEMORY_LIMIT,
        memory_used: int = 0,
        listen: Listener = ignore,
    ) -> Data:
        """`groups`: one number or name per sample, in the order of the samples."""
        if isinstance(source, Data):
            data: Data = source
        else:
            data = cls(Reader(name, memory_limit, memory_used, listen).read(source), name=name)
        return data if groups is None else cls(data._store, data._rows, data.name, _numbered(groups, len(data), name))

    def __len__(self) -> int:
        return self._store.size if self._rows is None else self._rows.numel()

    @property
    def nbytes(self) -> int:
        """Memory of the underlying samples, shared by all views of them."""
        return self._store.nbytes

    def rows(self, indices: Tensor) -> Tensor:
        """Where these samples are in the store, and in `columns`."""
        return indices if self._rows is None else self._rows[indices]

    def batch(self, indices: Tensor) -> Any:
        """These samples, collated, on the host."""
        return self._store.take(self.rows(indices))

    def sample(self, index: int) -> Any:
        """One sample as it was read, not collated; for data without `columns`."""
        assert isinstance(self._store, Samples)
        return self._store.samples[int(self.rows(torch.tensor(index)))]

    @property
    def columns(self) -> Any:
        """The stacked columns, all rows of them, or None for samples of uneven shapes; see `rows`."""
        return self._store.tree if isinstance(self._store, Columns) else None

    @cached_property
    def targets(self) -> Tensor | None:
        """The labels as they are, of any type and shape (n, ...), when they form one tensor."""
        found = self._store.targets()
        return found if found is None or self._rows is None else found[self._rows]

    @property
    def labels(self) -> Tensor | None:
        """One class per sample, (n,), when the data has such labels."""
        found = self.targets
        if found is None or found.ndim != 1 or found.is_floating_point() or found.is_complex():
            return None
        return None if found.dtype == torch.bool else found.long()

    def subset(self, indices: Tensor) -> Data:
        """A view of some samples; no data is copied."""
        indices = torch.as_tensor(indices, dtype=torch.long)
        if indices.numel() == 0:
            raise DataError.of(f"subset of {self.name}", "at least one sample", "none", "choose one or more indices")
        return Data(self._store, self.rows(indices), self.name, None if self.groups is None else self.groups[indices])

    # Order and folds depend on the seed and the step alone, so that a run can restart anywhere.

    def order(self, seed: int, step: int, batch_size: int) -> Tensor:
        """Indices of training batch number `step`, (size,); every sample comes once per epoch.

        It is piece number `step` of the endless concatenation of one permutation for each epoch.
        """
        n = len(self)
        size = min(batch_size, n)
        start, stop = step * size, (step + 1) * size
        epochs = range(start // n, (stop - 1) // n + 1)
        return torch.cat([_permutation(n, seed, k)[max(start - k * n, 0) : stop - k * n] for k in epochs])

    def folds(self, n: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """`n` pairs (fit, held out) of sorted indices; every sample is held out once, classes spread evenly.

        Groups stay whole.
        """
        size, subject = len(self), f"folds of {self.name}"
        if n < 2:
            fix = "ask for 2 or more folds, or use a method that does not cross-fit"
            raise DataError.of(subject, expected="at least 2 folds", found=str(n), fix=fix)
        units = size if self.groups is None else len(torch.unique(self.groups))
        needed, kind = (2 * n, "samples") if self.groups is None else (n, "groups")
        if units < needed:
            fix = "give more fitting data, use fewer folds (method.folds in a recipe), or a method without: greedy"
            raise DataError.of(subject, expected=f"at least {needed} {kind} for {n} folds", found=str(units), fix=fix)
        if self.groups is None:
            shuffled = torch.randperm(size, generator=generator("folds", seed))
            if self.labels is not None:
                # Stable: shuffled within each class. Dealing this out card by card then keeps both
                # the fold sizes and each class's share of every fold within one sample of even.
                shuffled = shuffled[torch.argsort(self.labels[shuffled], stable=True)]
            fold = torch.empty(size, dtype=torch.long)
            fold[shuffled] = torch.arange(size) % n
        else:
            fold = _folds_of_groups(self.groups, self.labels, n, seed)
        return [((fold != k).nonzero().flatten(), (fold == k).nonzero().flatten()) for k in range(n)]


def _numbered(groups: Any, size: int, name: str) -> Tensor:
    """Numbers or names of groups, one per sample, as numbers from 0; (n,)."""
    names = np.asarray(groups.cpu() if isinstance(groups, Tensor) else groups)
    if names.shape != (size,) or names.dtype.kind not in "iuUSb":
        raise DataError.of(
            f"groups of {name}",
            expected=f"one whole number or name for each of {size} samples",
            found=f"{names.dtype} of shape {names.shape}",
            fix="give the group of every sample, in the order of the samples",
        )
    found = torch.from_numpy(np.unique(names, return_inverse=True)[1].reshape(-1)).long()
    if int(found.max()) == 0:
        raise DataError.of(
            f"groups of {name}",
            expected="at least two groups: they are the independent units of folds and intervals",
            found=f"one group of {size} samples",
            fix="name the column that tells groups apart, or leave the groups out if samples are independent",
        )
    return found


def _folds_of_groups(groups: Tensor, labels: Tensor | None, n: int, seed: int) -> Tensor:
    """The fold of every sample, (N,): large groups first, each to the fold with the least of the classes it brings."""
    numbers = torch.unique(groups, return_inverse=True)[1]
    classes = torch.zeros_like(numbers) if labels is None else torch.unique(labels, return_inverse=True)[1]
    U, C = int(numbers.max()) + 1, int(classes.max()) + 1
    counts = torch.bincount(numbers * C + classes, minlength=U * C).view(U, C).double()
    shares = counts / counts.sum(0)  # (U, C) of each class
    held = torch.zeros(n, C, dtype=torch.float64)  # shares of each class in each fold
    shuffled = torch.randperm(U, generator=generator("folds", seed))
    fold = torch.empty(U, dtype=torch.long)
    for group in shuffled[torch.argsort(counts.sum(1)[shuffled], descending=True, stable=True)].tolist():
        # The least sum of squared shares afterwards; an empty fold comes before others that lack these classes.
        cost = held @ shares[group] + 1e-9 * held.sum(1)
        fold[group] = cost.argmin()
        held[fold[group]] += shares[group]
    return fold[numbers]


def fingerprint(data: Data) -> str:
    """Tells one set of samples from another, so that a run is not continued with other ones."""
    total = hashlib.sha256()
    for start in range(0, len(data), _PIECE):
        for path, leaf in leaves(data.batch(torch.arange(start, min(start + _PIECE, len(data))))):
            if isinstance(leaf, Tensor):
                total.update(f"{path}{leaf.dtype}{tuple(leaf.shape)}".encode())
                total.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            else:
                total.update(f"{path}{leaf!r}".encode())
    if data.groups is not None:
        total.update(data.groups.numpy().tobytes())
    return total.hexdigest()


# Random streams ---------------------------------------------------------------------------------------


def generator(*stream: int | str) -> torch.Generator:
    """An independent random stream named by its arguments alone."""
    # Hashed, not added: seed 1 epoch 2 must not be the same stream as seed 2 epoch 1.
    digest = hashlib.sha256(repr(stream).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@contextmanager
def forked_random(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Gives a function that seeds what models draw from on the host and the device; restored on exit."""

    def seed(value: int) -> None:
        # Not torch.manual_seed: where CUDA is not in use yet, it formats and keeps a stack trace at every call.
        torch.default_generator.manual_seed(value)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(value)

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield seed


# Cross-fitting walks through several subsets in turn, each with its own current epoch.
@lru_cache(maxsize=16)
def _permutation(n: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(n, generator=generator("epoch", seed, epoch))  # (n,)


# Report data behind a seal ----------------------------------------------------------------------------
#
# It can be opened once everything is decided, and then nothing new can be decided. What the data says may not flow
# back into a decision, so the order is kept by state and not by good manners: whoever opens the seal names the
# decisions that will be scored, and from then on the task takes part in no other decision.

_FIX = (
    "decide everything first: compare(pool, task, [...]) runs several methods and reports on all of them at the end;"
    " while you try things out, use a Task without report data; for a new question make a new Task, at best with data"
    " that no earlier choice has seen"
)


class Sealed:
    """Sets of samples that no attribute and no method gives away, except `open`, which gives all of them at once."""

    __slots__ = ("__decisions", "__sets")

    def __init__(self, sets: Mapping[str, Data | Benchmark]) -> None:
        self.__sets = dict(sets)
        self.__decisions: frozenset[str] | None = None  # None: nobody has looked

    @property
    def names(self) -> list[str]:
        return list(self.__sets)

    @property
    def largest(self) -> int:
        """How many samples the largest set has."""
        return max((len(one) for one in self.__sets.values() if isinstance(one, Data)), default=0)

    def check_may_decide(self, decision: str) -> None:
        """Refuse a decision that could have been influenced; one that was named before may be made again."""
        if self.__decisions is not None and decision not in self.__decisions:
            raise TaskError.of(
                "this task's report data",
                expected="to be looked at after the last decision",
                found=f"a new decision, although it was looked at for {len(self.__decisions)} earlier ones",
                fix=_FIX,
            )

    def open(self, decisions: Iterable[str]) -> dict[str, Data | Benchmark]:
        """The sets by name, to score these decisions and no others ever after."""
        named = frozenset(decisions)
        for decision in named:
            self.check_may_decide(decision)
        if self.__decisions is None:
            self.__decisions = named
        return dict(self.__sets)

    def equal(self, data: Data) -> tuple[str, ...]:
        """The sets that have the same samples; only those of the same size are looked at."""
        sets = ((name, one) for name, one in self.__sets.items() if isinstance(one, Data) and len(one) == len(data))
        return tuple(name for name, one in sets if fingerprint(one) == fingerprint(data))

    def fingerprints(self) -> dict[str, str]:
        """Tells each set of samples from others, and nothing else about it."""
        return {
            name: fingerprint(one) if isinstance(one, Data) else one.fingerprint() for name, one in self.__sets.items()
        }

    def metrics(self) -> dict[str, Metric]:
        """Of the sets that have their own."""
        return {name: one.metric for name, one in self.__sets.items() if isinstance(one, Benchmark)}
