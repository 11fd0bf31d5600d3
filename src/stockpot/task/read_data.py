"""From whatever the user has to data in host memory, read once."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, default_collate

from stockpot.errors import DataError
from stockpot.events import Listener, progress
from stockpot.task.batches import find_labels, leaves, map_tensors, map_tree, next_of, refill, users_code

CHUNK = 64  # samples decoded at a time
PROBE = 8  # samples on which a collate_fn shows whether it treats each sample by itself
Collate = Callable[[list[Any]], Any]

# The two forms in which data is kept ------------------------------------------------------------------


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

    def __init__(self, samples: Sequence[Any], collate: Collate) -> None:
        self.samples = samples
        self.collate = collate
        self.size = len(samples)

    @property
    def nbytes(self) -> int:
        """Near enough to keep a limit."""
        parts = (leaf for sample in self.samples for _, leaf in leaves(sample))
        return sum(getattr(leaf, "nbytes", None) or sys.getsizeof(leaf) for leaf in parts)

    def take(self, rows: Tensor) -> Any:
        return self.collate([self.samples[row] for row in rows.tolist()])

    def targets(self) -> Tensor | None:
        found = [find_labels(sample) for sample in self.samples]
        if all(isinstance(label, (int, float, np.number)) and not isinstance(label, bool) for label in found):
            return torch.tensor(found)
        if all(isinstance(label, Tensor) and label.shape == found[0].shape for label in found):
            return torch.stack(found)
        return None


class _UnevenError(DataError):
    """Batches that do not stack into columns."""


class _Builder:
    """Stacks batches into columns, growing in place so that data is never held twice for long."""

    def __init__(self, name: str, *, rows: int | None = None, batches: int = 1) -> None:
        self.name = name
        self.rows = 0
        self._expected_rows, self._expected_batches = rows, batches
        self._tree: Any = ()
        self._columns: dict[str, Tensor] = {}

    @property
    def row_nbytes(self) -> int:
        return sum(column.element_size() * math.prod(column.shape[1:]) for column in self._columns.values())

    def add(self, batch: Any, which: str) -> None:
        batch = _as_tensors(batch)
        size = _length(batch, f"a batch of {self.name}")
        parts: dict[str, Tensor] = dict(leaves(batch))
        if not self._columns:
            self._tree = batch
            # Untouched pages of an empty tensor cost nothing, so room for all rows is free until used.
            room = self._expected_rows or size * self._expected_batches
            self._columns = {path: leaf.new_empty((room, *leaf.shape[1:])) for path, leaf in parts.items()}
        if list(parts) != list(self._columns):
            shown = ["the parts " + ", ".join(path or "(a tensor)" for path in tree) for tree in (self._columns, parts)]
            raise self._uneven("batches", shown, which)
        end = self.rows + size
        for path, leaf in parts.items():
            column = self._columns[path]
            if leaf.shape[1:] != column.shape[1:] or leaf.dtype != column.dtype:
                shown = [f"{tuple(x.shape[1:])} {x.dtype} per sample".replace("torch.", "") for x in (column, leaf)]
                raise self._uneven(f"batch{path}", shown, which)
            if end > len(column):
                column.resize_(max(end, 2 * len(column)), *column.shape[1:])
            column[self.rows : end] = leaf
        self.rows = end

    def _uneven(self, where: str, shown: list[str], which: str) -> _UnevenError:
        return _UnevenError.of(
            f"{self.name}, {where}",
            expected=f"{shown[0]} as in the first batch",
            found=f"{shown[1]} in {which}",
            fix="pad all samples to one length,"
            " or give a DataLoader over a map-style Dataset with a collate_fn that pads",
        )

    def finish(self) -> Columns:
        return Columns(refill(self._tree, (column[: self.rows] for column in self._columns.values())), self.rows)


def _as_tensors(tree: Any) -> Any:
    """Arrays become tensors; tensors come to the host without their graph."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
        return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf

    return map_tree(convert, tree)


def _length(tree: Any, subject: str) -> int:
    """The common first dimension of all tensors of a batch."""
    lengths = {}
    for path, leaf in leaves(tree):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            raise DataError.of(
                f"{subject}{path}",
                expected="a tensor with one row per sample",
                found="a tensor without dimensions" if isinstance(leaf, Tensor) else type(leaf).__name__,
                fix="give tensors, or a map-style Dataset, or a DataLoader with a collate_fn",
            )
        lengths[path] = leaf.shape[0]
    if not lengths:
        raise DataError.of(subject, "at least one tensor", "none", "give (inputs, labels), or a dict of tensors")
    if len(set(lengths.values())) > 1:
        raise DataError.of(
            subject,
            expected="the same number of rows in every tensor",
            found=", ".join(f"{path}: {length}" for path, length in lengths.items()),
            fix="make the first dimension of every tensor the sample",
        )
    return next(iter(lengths.values()))


# Reading ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """Reads one set of data, called `name` in messages, into at most `limit` bytes less those already `used`."""

    name: str
    limit: int
    used: int
    listen: Listener

    def read(self, source: Any) -> Columns | Samples:
        """Materialise `source`; see `Data` for what it may be."""
        # Random transforms are frozen by reading once; our own seed makes them the same in every run,
        # and leaves the caller's random state alone.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # not torch.manual_seed, which also reseeds accelerators
            store = self._read(source)
        if store.size == 0:
            fix = "check the path, split or filter that produced it (an iterator can be read only once)"
            raise DataError.of(self.name, expected="at least one sample", found="none", fix=fix)
        return store

    def _read(self, source: Any) -> Columns | Samples:
        arrays = (Tensor, np.ndarray)
        if isinstance(source, TensorDataset):
            return self._columns(source.tensors)
        if isinstance(source, DataLoader):
            return self._loader(source)
        if isinstance(source, IterableDataset):
            return self._batches(DataLoader(source, batch_size=CHUNK))
        if isinstance(source, list):
            if source and all(isinstance(part, arrays) for part in source):
                return self._columns(source)
            # A list holds batches if every leaf has as many rows; otherwise it holds single samples.
            first = [leaf for _, leaf in leaves(source[0])] if source else []
            rows = {leaf.shape[0] if isinstance(leaf, arrays) and leaf.ndim else None for leaf in first}
            if not source or (len(rows) == 1 and None not in rows):
                return self._batches(source)
        if isinstance(source, (*arrays, tuple, Mapping)):
            return self._columns(source)
        if not isinstance(source, (str, bytes)):
            if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
                return self._dataset(source, range(len(source)), default_collate)
            if isinstance(source, Iterable):
                return self._batches(source)
        fix, known = "for example (inputs, labels) as two tensors", "a Dataset, a DataLoader, or an iterable of batches"
        raise DataError.of(self.name, expected=f"tensors, {known}", found=type(source).__name__, fix=fix)

    def _columns(self, tree: Any) -> Columns:
        tree = _as_tensors(tree)
        store = Columns(tree, _length(tree, self.name))
        self._check(store.nbytes)
        return store

    def _batches(self, source: Iterable[Any]) -> Columns:
        """Batches that exist already: rows are appended; nothing can be collated again."""
        try:
            total = len(source) if isinstance(source, Sized) else None
        except TypeError:  # a DataLoader over an IterableDataset has __len__ but no length
            total = None
        builder = _Builder(self.name, batches=total or 1)
        for count, batch in enumerate(next_of(source, f"{self.name}, {type(source).__name__}", source), start=1):
            builder.add(batch, f"batch {count - 1}")
            nbytes = builder.rows * builder.row_nbytes
            self._check(nbytes)
            if total is not None:
                progress(self.listen, self.name, count, total, unit="batches")
                # The last batch may be short, so only those before it are counted.
                self._check(nbytes / count * max(total - 1, count), estimated=True)
        return builder.finish()

    def _loader(self, loader: DataLoader[Any]) -> Columns | Samples:
        dataset: Any = loader.dataset
        if isinstance(dataset, IterableDataset):
            return self._batches(loader)
        indices = self._indices(loader)
        if loader.batch_sampler is None:  # automatic batching is off: each item of the dataset is a batch
            return self._batches(loader.collate_fn(dataset[index]) for index in indices)
        whole = isinstance(dataset, TensorDataset) and len(indices) == len(dataset)
        if whole and loader.collate_fn is default_collate:
            return self._columns(dataset.tensors)
        options = {"num_workers": loader.num_workers, "worker_init_fn": loader.worker_init_fn}
        context = loader.multiprocessing_context if loader.num_workers else None
        return self._dataset(dataset, indices, loader.collate_fn, multiprocessing_context=context, **options)

    def _indices(self, loader: DataLoader[Any]) -> Sequence[int]:
        """The samples a loader visits, in the dataset's order: its shuffling is ignored, its choice is not."""
        batches: Any = loader.batch_sampler
        if batches is None or type(batches) is BatchSampler:  # of whose batches the last may be dropped
            visited = list(cast(Iterable[int], loader.sampler))
        else:
            visited = [index for batch in batches for index in batch]
        if repeated := len(visited) - len(set(visited)):
            subject = f"{self.name}, sampler {type(loader.sampler).__name__}"
            fix = "give a DataLoader without that sampler; stockpot shuffles by itself"
            raise DataError.of(subject, expected="each sample at most once", found=f"{repeated} repeated", fix=fix)
        return sorted(visited)

    def _dataset(self, dataset: Any, indices: Sequence[int], collate: Collate, **options: Any) -> Columns | Samples:
        def chunks(finish: Collate) -> Iterator[Any]:
            reader = DataLoader(
                dataset, batch_size=CHUNK, sampler=indices, collate_fn=finish, generator=torch.Generator(), **options
            )
            for count, chunk in enumerate(next_of(reader, f"{self.name}, {type(dataset).__name__}", dataset), start=1):
                yield chunk
                progress(self.listen, self.name, min(count * CHUNK, len(indices)), len(indices), unit="samples")

        if len(indices) == 0:
            return Samples([], collate)
        stacks = collate is default_collate
        collate = partial(_stack, self.name) if stacks else partial(_collated, self.name, collate)
        with users_code(f"{self.name}, {type(dataset).__name__}", dataset):
            first = [dataset[index] for index in indices[:PROBE]]
        if _is_rowwise(collate, first):
            builder = _Builder(self.name, rows=len(indices))
            try:
                for chunk in chunks(collate):
                    builder.add(chunk, f"samples from {builder.rows} on")
                    self._check(builder.row_nbytes * len(indices), estimated=True)
                return builder.finish()
            except _UnevenError:
                if stacks:
                    raise
        samples: list[Any] = []
        nbytes = 0
        for chunk in chunks(list):
            # Cloned: a sample may be a view of something larger, or lie in a worker's shared memory.
            kept = map_tensors(lambda leaf: leaf.detach().cpu().clone(), chunk)
            samples += kept
            nbytes += Samples(kept, collate).nbytes
            self._check(nbytes)
            # Sizes vary, so an estimate from the first samples must be far out before it counts.
            self._check(nbytes / len(samples) * len(indices), estimated=True, slack=2)
        return Samples(samples, collate)

    def _check(self, nbytes: float, *, estimated: bool = False, slack: float = 1.0) -> None:
        """Refuse more than the limit; an uncertain estimate must be out by more than the factor `slack`."""
        if nbytes + self.used > self.limit * slack:
            others = f" ({_size(self.used)} of it in use by other data)" if self.used else ""
            raise DataError.of(
                self.name,
                expected=f"at most {_size(self.limit)} in memory{others}",
                found=f"{'about ' if estimated else ''}{_size(nbytes)}",
                fix="raise memory_limit (bytes), give fewer samples, or keep images as uint8"
                " and convert inside the model",
            )


def _size(nbytes: float) -> str:
    power = next((power for power in range(3) if nbytes < 1024 ** (power + 1)), 3)
    return f"{nbytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _stack(name: str, samples: list[Any]) -> Any:
    """PyTorch's default collate, explaining itself when samples do not stack."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        raise DataError.of(
            name,
            expected="samples of tensors and numbers with equal shapes",
            found=f"samples that do not stack ({error})",
            fix="convert them to tensors and pad them to one length, or give a DataLoader with a collate_fn",
        ) from error


def _collated(name: str, collate: Collate, samples: list[Any]) -> Any:
    with users_code(f"collate_fn of the {name}", collate, samples):
        return collate(samples)


def _is_rowwise(collate: Collate, samples: list[Any]) -> bool:
    """Whether a batch is its samples stacked, so that collating once is the same as collating each time."""
    half = (len(samples) + 1) // 2
    trees = (collate(part) for part in (samples, samples[:half], samples[half:]) if part)
    whole, *pieces = (dict(leaves(_as_tensors(tree))) for tree in trees)
    if any(list(piece) != list(whole) for piece in pieces):
        return False
    for path, leaf in whole.items():
        rows = [piece[path] for piece in pieces]
        if not all(isinstance(x, Tensor) and x.ndim and x.shape[1:] == leaf.shape[1:] for x in (leaf, *rows)):
            return False
        if len(leaf) != len(samples) or not torch.equal(torch.cat(rows), leaf):
            return False
    return True
