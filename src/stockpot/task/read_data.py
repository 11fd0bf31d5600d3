"""From whatever the user has to data in memory, read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from stockpot.errors import DataError
from stockpot.events import Listener, progress
from stockpot.task.batches import leaves, map_tensors
from stockpot.task.store import Builder, Columns, Samples, UnevenError, as_tensors, batch_length, sample_nbytes

CHUNK = 64  # samples decoded at a time
PROBE = 8  # samples on which a collate_fn shows whether it treats each sample by itself


@dataclass(frozen=True)
class Budget:
    """How much memory data may take, and whose data it is."""

    name: str
    limit: int
    used: int = 0

    def check(self, nbytes: float, *, estimated: bool = False, slack: float = 1.0) -> None:
        """Refuse more than the limit; an uncertain estimate must be out by more than the factor `slack`."""
        if nbytes + self.used > self.limit * slack:
            others = f" ({_size(self.used)} of it in use by other data)" if self.used else ""
            raise DataError.of(
                self.name,
                expected=f"at most {_size(self.limit)} in memory{others}",
                found=f"{'about ' if estimated else ''}{_size(nbytes)}",
                fix="raise memory_limit (bytes), give fewer samples, or keep images as uint8 "
                "and convert inside the model",
            )


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def read(source: Any, budget: Budget, *, workers: int, listen: Listener) -> Columns | Samples:
    """Materialise `source`; see `Data` for what it may be."""
    # Random transforms are frozen by reading once; our own seed makes them the same in every run,
    # and leaves the caller's random state alone.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not torch.manual_seed, which also reseeds accelerators
        store = _dispatch(source, budget, workers, listen)
    if store.size == 0:
        raise DataError.of(
            budget.name,
            expected="at least one sample",
            found="none",
            fix="check the path, split or filter that produced it (an iterator can be read only once)",
        )
    return store


def _dispatch(source: Any, budget: Budget, workers: int, listen: Listener) -> Columns | Samples:
    if isinstance(source, (Tensor, np.ndarray, tuple, Mapping)) or _is_list_of_arrays(source):
        return _columns(source, budget)
    if isinstance(source, TensorDataset):
        return _columns(source.tensors, budget)
    if isinstance(source, DataLoader):
        return _loader(source, budget, workers, listen)
    if isinstance(source, IterableDataset):
        return _batches(DataLoader(source, batch_size=CHUNK, num_workers=workers), budget, listen)
    if isinstance(source, list):
        if not source or _is_batch(source[0]):
            return _batches(source, budget, listen)
        return _dataset(source, range(len(source)), default_collate, budget, {"num_workers": workers}, listen)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, (str, bytes)):
        return _dataset(source, range(len(source)), default_collate, budget, {"num_workers": workers}, listen)
    if isinstance(source, Iterable) and not isinstance(source, (str, bytes)):
        return _batches(source, budget, listen)
    raise DataError.of(
        budget.name,
        expected="tensors, a Dataset, a DataLoader, or an iterable of batches",
        found=f"{type(source).__name__}",
        fix="for example (inputs, labels) as two tensors",
    )


def _is_list_of_arrays(source: Any) -> bool:
    return isinstance(source, list) and bool(source) and all(isinstance(part, (Tensor, np.ndarray)) for part in source)


def _is_batch(tree: Any) -> bool:
    """Whether a list holds batches: rows in every leaf. Otherwise it holds single samples."""
    found = [leaf for _, leaf in leaves(tree)]
    if not all(isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim for leaf in found):
        return False
    return len({leaf.shape[0] for leaf in found}) == 1


def _columns(tree: Any, budget: Budget) -> Columns:
    tree = as_tensors(tree)
    store = Columns(tree, batch_length(tree, budget.name))
    budget.check(store.nbytes)
    return store


def _batches(source: Iterable[Any], budget: Budget, listen: Listener) -> Columns:
    """Batches that exist already: rows are appended; nothing can be collated again."""
    total = _length(source)
    builder = Builder(budget.name, batches=total)
    for count, batch in enumerate(source, start=1):
        try:
            builder.add(batch)
        except UnevenError as uneven:
            raise _uneven(uneven, budget, f"batch {count - 1}") from None
        budget.check(builder.rows * builder.row_nbytes)
        if total is not None:
            progress(listen, budget.name, count, total, unit="batches")
            # The last batch may be short, so only those before it are counted.
            budget.check(builder.rows * builder.row_nbytes / count * max(total - 1, count), estimated=True)
    return builder.finish() if builder.rows else Columns((), 0)


def _length(source: Iterable[Any]) -> int | None:
    try:
        return len(source) if isinstance(source, Sized) else None
    except TypeError:  # a DataLoader over an IterableDataset has __len__ but no length
        return None


def _uneven(uneven: UnevenError, budget: Budget, which: str) -> DataError:
    return DataError.of(
        f"{budget.name}, {uneven.where}",
        expected=f"{uneven.expected} as in the first batch",
        found=f"{uneven.found} in {which}",
        fix="pad all samples to one length, or give a DataLoader over a map-style Dataset with a collate_fn that pads",
    )


def _loader(loader: DataLoader[Any], budget: Budget, workers: int, listen: Listener) -> Columns | Samples:
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return _batches(loader, budget, listen)
    indices = _indices(loader, budget)
    if loader.batch_sampler is None:  # automatic batching is off: each item of the dataset is a batch
        items = cast(Any, dataset)
        return _batches((loader.collate_fn(items[index]) for index in indices), budget, listen)
    if isinstance(dataset, TensorDataset) and loader.collate_fn is default_collate and isinstance(indices, range):
        return _columns(dataset.tensors, budget)
    options = {
        "num_workers": workers or loader.num_workers,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context if loader.num_workers else None,
    }
    return _dataset(dataset, indices, loader.collate_fn, budget, options, listen)


def _indices(loader: DataLoader[Any], budget: Budget) -> Sequence[int]:
    """The samples a loader visits, in the dataset's order: its shuffling is ignored, its choice is not."""
    sampler: Any = loader.sampler
    size = len(cast(Any, loader.dataset))
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        visited = [index for batch in loader.batch_sampler for index in batch]
    elif isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == size
    ):
        return range(size)
    else:
        visited = list(sampler)
    if len(set(visited)) < len(visited):
        raise DataError.of(
            f"{budget.name}, sampler {type(sampler).__name__}",
            expected="each sample at most once",
            found=f"{len(visited) - len(set(visited))} repeated",
            fix="give a DataLoader without that sampler; stockpot shuffles by itself",
        )
    return sorted(visited)


def _dataset(
    dataset: Any,
    indices: Sequence[int],
    collate: Callable[[list[Any]], Any],
    budget: Budget,
    options: dict[str, Any],
    listen: Listener,
) -> Columns | Samples:
    if len(indices) == 0:
        return Samples([], collate)
    stacks = collate is default_collate

    def chunks(finish: Callable[[list[Any]], Any]) -> Iterator[Any]:
        reader = DataLoader(
            dataset, batch_size=CHUNK, sampler=indices, collate_fn=finish, generator=torch.Generator(), **options
        )
        for count, chunk in enumerate(reader, start=1):
            yield chunk
            progress(listen, budget.name, min(count * CHUNK, len(indices)), len(indices), unit="samples")

    if stacks:
        collate = _Stack(budget.name)
    if _is_rowwise(collate, [dataset[index] for index in indices[:PROBE]]):
        builder = Builder(budget.name, rows=len(indices))
        try:
            for chunk in chunks(collate):
                builder.add(chunk)
                budget.check(builder.row_nbytes * len(indices), estimated=True)
            return builder.finish()
        except UnevenError as uneven:
            if stacks:
                raise _uneven(uneven, budget, f"samples from {builder.rows} on") from None
    samples: list[Any] = []
    nbytes = 0
    for chunk in chunks(_as_list):
        # Cloned: a sample may be a view of something larger, or lie in a worker's shared memory.
        kept = map_tensors(lambda leaf: leaf.detach().cpu().clone(), chunk)
        samples += kept
        nbytes += sum(sample_nbytes(sample) for sample in kept)
        budget.check(nbytes)
        # Sizes vary, so an estimate from the first samples must be far out before it counts.
        budget.check(nbytes / len(samples) * len(indices), estimated=True, slack=2)
    return Samples(samples, collate)


def _is_rowwise(collate: Callable[[list[Any]], Any], samples: list[Any]) -> bool:
    """Whether a batch is its samples stacked, so that collating once is the same as collating each time."""
    half = (len(samples) + 1) // 2
    parts = [list(leaves(as_tensors(collate(part)))) for part in (samples, samples[:half], samples[half:]) if part]
    if not all(isinstance(leaf, Tensor) and leaf.ndim for part in parts for _, leaf in part):
        return False
    whole, pieces = parts[0], parts[1:]
    if any([path for path, _ in piece] != [path for path, _ in whole] for piece in pieces):
        return False
    for index, (_, leaf) in enumerate(whole):
        rows = [piece[index][1] for piece in pieces]
        if leaf.shape[0] != len(samples) or any(row.shape[1:] != leaf.shape[1:] for row in rows):
            return False
        if not torch.equal(torch.cat(rows), leaf):
            return False
    return True


class _Stack:
    """PyTorch's default collate, explaining itself when samples do not stack."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError) as error:
            raise DataError.of(
                self.name,
                expected="samples of tensors and numbers with equal shapes",
                found=f"samples that do not stack ({error})",
                fix="convert them to tensors and pad them to one length, or give a DataLoader with a collate_fn",
            ) from error


def _as_list(samples: list[Any]) -> list[Any]:
    return samples
