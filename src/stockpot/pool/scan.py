"""The one pass over the files of a pool: fingerprints, values that are not finite, inner products.

Tensor by tensor and block by block, the bytes of all K ingredients are read side by side: they are hashed, and the same
bytes, still in memory, give the sums that finiteness and distances need, all of it on several threads. What the pass
found is kept for each ingredient, so that the facts of any part of the pool follow without reading again.

The digest of a checkpoint is SHA-256 over one line for each tensor, in code-point order of the names: JSON of
`[name, dtype, shape, SHA-256 of the tensor's bytes in row-major order]`, then a newline. It depends on nothing else,
so a `.pt` file and its safetensors conversion have the same digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stockpot.events import Listener, progress
from stockpot.pool.source import Checkpoint, TensorSpec, dtype_name

THREADS = 8  # twice as many gained nothing on 16 slow cores
BLOCK = 1 << 26  # bytes of all ingredients together that are hashed and summed before the next are read
CHUNK = 1 << 18  # values of all ingredients together that a thread holds in fp64 at a time
LEAST = 1 << 15  # values of one ingredient in a chunk: with many ingredients, slicing took longer than the sums
_INLINE = 1 << 16  # bytes; less is done at once, a thread would cost more
_WAITING = 256  # tensors whose work may be outstanding
_EVENTS = 200  # progress events at most, about, however many tensors there are


@dataclass(frozen=True, slots=True)
class TensorScan:
    """What the pass found of one tensor, for each of K ingredients."""

    stored: tuple[str, ...]  # SHA-256 of its bytes in the file
    values: tuple[str, ...]  # the same in the pool's dtype
    constant: tuple[bool, ...]  # whether it is one repeated value
    counts: Tensor  # (2, K): how many values are NaN and infinite
    squares: Tensor  # (K,) float64: sums of squares
    gram: Tensor | None = None  # (K, K) float64: inner products, where they are not in those of the whole

    def part(self, chosen: Sequence[int]) -> TensorScan:
        stored, values = (tuple(every[k] for k in chosen) for every in (self.stored, self.values))
        constant, gram = tuple(self.constant[k] for k in chosen), self.gram
        gram = None if gram is None else gram[chosen][:, chosen]
        return TensorScan(stored, values, constant, self.counts[:, chosen], self.squares[chosen], gram)


@dataclass(frozen=True)
class Scan:
    """What the pass found. `measured` is false when only hashes were asked for.

    The inner products leave out what is frozen or no weight, and content that an earlier tensor has, which may be tied
    to it; their origin is the same for all ingredients.
    """

    measured: bool
    digests: tuple[str, ...]
    tensors: Mapping[str, TensorScan]
    gram: Tensor  # (K, K) float64
    base: str | None = None  # digest of the base of adapters

    def part(self, chosen: Sequence[int]) -> Scan:
        """The same of some ingredients."""
        tensors = {name: tensor.part(chosen) for name, tensor in self.tensors.items()}
        digests, gram = tuple(self.digests[k] for k in chosen), self.gram[chosen][:, chosen]
        return Scan(self.measured, digests, tensors, gram, self.base)


def scan(
    checkpoints: Sequence[Checkpoint],
    specs: Mapping[str, TensorSpec],
    listen: Listener,
    *,
    no_weights: frozenset[str] = frozenset(),
    hashes_only: bool = False,
) -> Scan:
    """Read everything once. `no_weights` are tensors that distances do not count."""
    total = sum(checkpoint.specs[name].nbytes for checkpoint in checkpoints for name in specs)
    done = announced = 0
    progress(listen, "hash", 0, total)
    found: dict[str, TensorScan] = {}
    gram = torch.zeros(len(checkpoints), len(checkpoints), dtype=torch.float64)
    seen: set[tuple[object, ...]] = set()
    for name, tensor in _finished(checkpoints, specs, hashes_only):
        stored, values = (tuple(made.hexdigest() for made in hashes) for hashes in (tensor.stored, tensor.values))
        content = (*(checkpoint.specs[name] for checkpoint in checkpoints), *stored)
        differs = tensor.floating and name not in no_weights and len({*values}) > 1
        repeated = tensor.gram if differs and content in seen else None
        if differs and content not in seen:
            gram += tensor.gram
        seen.add(content)
        found[name] = TensorScan(stored, values, tuple(tensor.constant), tensor.counts, tensor.squares, repeated)
        done += tensor.nbytes
        if done - announced >= max(total // _EVENTS, 1) or (done == total and announced < total):
            progress(listen, "hash", done, total)
            announced = done
    digests = tuple(_digest(checkpoint.specs, found, k) for k, checkpoint in enumerate(checkpoints))
    return Scan(not hashes_only, digests, found, gram)


def raw_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, row-major: a view where it is contiguous, else a copy."""
    # A single number counts as contiguous whatever its stride, which `view` does not accept.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _finished(
    checkpoints: Sequence[Checkpoint], specs: Mapping[str, TensorSpec], hashes_only: bool
) -> Iterator[tuple[str, _Tensor]]:
    """Every tensor once it is hashed and summed; the next ones are begun meanwhile."""
    workers = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="stockpot-scan")
    waiting: deque[tuple[str, _Tensor]] = deque()
    held = 0  # bytes in the last blocks of those that wait
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's own threads would stand in the way of ours
    try:
        for name, spec in specs.items():
            tensor = _Tensor([checkpoint.tensor(name) for checkpoint in checkpoints], spec.dtype)
            tensor.follow(None if tensor.nbytes < _INLINE else workers, hashes_only)
            waiting.append((name, tensor))
            held += min(tensor.nbytes, BLOCK)
            while len(waiting) > _WAITING or held > 2 * BLOCK:
                held -= min(waiting[0][1].nbytes, BLOCK)
                waiting[0][1].wait()
                yield waiting.popleft()
        for name, tensor in waiting:
            tensor.wait()
            yield name, tensor
    finally:
        workers.shutdown(cancel_futures=True)  # on Ctrl-C do not finish gigabytes first
        torch.set_num_threads(threads)


# Of a chunk: squares (K,), counts of NaN and infinity (2, K) where there are some, inner products (K, K) where
# ingredients differ.
_Sums = tuple[Tensor, Tensor | None, Tensor | None]


class _Tensor:
    """One tensor of all K ingredients on its way through the pass."""

    def __init__(self, parts: list[Tensor], dtype: torch.dtype) -> None:
        self._parts, self._dtype = [part.squeeze() for part in parts], dtype
        self.floating = dtype.is_floating_point or dtype.is_complex
        self.nbytes = sum(part.numel() * part.dtype.itemsize for part in parts)
        self.stored = [hashlib.sha256() for _ in parts]  # of the bytes in the file, and below in the pool's dtype
        pairs = zip(parts, self.stored, strict=True)
        self.values = [stored if part.dtype == dtype else hashlib.sha256() for part, stored in pairs]
        self.constant = [part.numel() > 0 for part in parts]
        self._first: dict[int, Tensor] = {}  # bytes of the first value
        self.counts = torch.zeros(2, len(parts), dtype=torch.int64)  # of NaN and of infinite values
        self.gram = torch.zeros(len(parts), len(parts), dtype=torch.float64)  # (K, K)
        self.squares = torch.zeros(len(parts), dtype=torch.float64)  # (K,)
        self._jobs: list[Future[_Sums | None]] = []

    def follow(self, workers: ThreadPoolExecutor | None, hashes_only: bool) -> None:
        """Hash and sum all of it; the work on its last block is not waited for."""
        numel = self._parts[0].numel()
        # Sums need the ingredients side by side; for hashes alone nobody waits for the others, unless it takes copies.
        as_stored = all(part.is_contiguous() and part.dtype == self._dtype for part in self._parts)
        step = max(numel, 1) if hashes_only and as_stored else max(BLOCK * numel // max(self.nbytes, 1), 1)
        for start in range(0, numel, step):
            self.wait()  # SHA-256 takes the blocks in their order
            blocks = [_stretch(part, start, min(start + step, numel)) for part in self._parts]
            for k, block in enumerate(blocks):
                self._do(workers, self._hash, k, block)
            if self.floating and not hashes_only:
                flat = [torch.view_as_real(block).reshape(-1) if block.is_complex() else block for block in blocks]
                width = max(CHUNK // len(flat), LEAST)
                for first in range(0, flat[0].numel(), width):
                    self._do(workers, _sums, [part[first : first + width] for part in flat])

    def wait(self) -> None:
        """Until all work is done. Sums are added in the order of the numbers, whichever thread was first."""
        for job in self._jobs:
            self._add(job.result())
        self._jobs = []

    def _do(self, workers: ThreadPoolExecutor | None, work: Callable[..., _Sums | None], *arguments: Any) -> None:
        if workers is None:
            self._add(work(*arguments))
        else:
            self._jobs.append(workers.submit(work, *arguments))

    def _add(self, sums: _Sums | None) -> None:
        for own, more in zip((self.squares, self.counts, self.gram), sums or (), strict=False):
            if more is not None:
                own += more

    def _hash(self, k: int, block: Tensor) -> None:
        raw = raw_bytes(block)
        self.stored[k].update(raw.numpy().data)  # releases the interpreter's lock
        if self.values[k] is not self.stored[k]:
            self.values[k].update(raw_bytes(block.to(self._dtype)).numpy().data)
        if self.constant[k]:
            rows = raw.view(block.numel(), -1)  # (values, bytes of one)
            first = self._first.setdefault(k, rows[0])
            self.constant[k] = torch.equal(rows[-1], first) and torch.equal(rows, first.expand_as(rows))


def _sums(chunks: list[Tensor]) -> _Sums:
    """Inner products of the *centred* ingredients in fp64.

    Fine-tunes of one model are close to each other and far from zero; centring first is what keeps the subtraction in
    |x|^2 + |y|^2 - 2<x, y> from losing digits.
    """
    same = _equal(chunks)
    rows = torch.stack([chunk.double() for chunk in (chunks[:1] if same else chunks)])  # (K or 1, width)
    squares = rows.square().sum(dim=1)  # (K,) or (1,)
    counts, sound = None, squares.isfinite()
    if bool(sound.all()):
        centre = rows.mean(dim=0)
    else:  # whoever is not finite here must not spoil the origin of the others
        centre = rows[sound].sum(dim=0) / max(int(sound.sum()), 1)
        counts = torch.stack([rows.isnan().sum(dim=1), rows.isinf().sum(dim=1)])  # (2, K) or (2, 1)
    if same:
        return squares, counts, None
    rows -= centre
    return squares, counts, rows @ rows.T


def _stretch(part: Tensor, start: int, stop: int) -> Tensor:
    """Elements `start` to `stop` in row-major order; of a part that is not contiguous, only these rows are copied."""
    if part.is_contiguous():
        return part.reshape(-1)[start:stop]
    width = part.numel() // len(part)
    first = start // width
    return part[first : -(-stop // width)].reshape(-1)[start - first * width : stop - first * width]


def _equal(chunks: list[Tensor]) -> bool:
    if len({chunk.dtype for chunk in chunks}) > 1:
        return False
    first, *others = (raw_bytes(chunk) for chunk in chunks)
    # A few bytes tell nearly always.
    return all(torch.equal(first[:64], o[:64]) for o in others) and all(torch.equal(first, o) for o in others)


def _digest(specs: Mapping[str, TensorSpec], found: Mapping[str, TensorScan], k: int) -> str:
    total = hashlib.sha256()
    for name in sorted(specs):
        line = [name, dtype_name(specs[name].dtype), list(specs[name].shape), found[name].stored[k]]
        total.update(json.dumps(line, ensure_ascii=True).encode() + b"\n")
    return total.hexdigest()
