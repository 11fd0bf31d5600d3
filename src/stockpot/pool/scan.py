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
from stockpot.pool.checkpoint import Checkpoint
from stockpot.pool.source import TensorSpec, dtype_name

THREADS = 8  # twice as many gained nothing on 16 slow cores
BLOCK = 1 << 26  # bytes of all ingredients together that are hashed and summed before the next are read
CHUNK = 1 << 18  # values of all ingredients together that a thread holds in fp64 at a time
_INLINE = 1 << 16  # bytes; less is done at once, a thread would cost more
_WAITING = 256  # tensors whose hashes may be outstanding
_EVENTS = 200  # progress events at most, about, however many tensors there are


@dataclass(frozen=True)
class Scan:
    """What the pass found, one entry for each ingredient. `measured` is false when only hashes were asked for."""

    measured: bool
    digests: tuple[str, ...]
    stored: tuple[Mapping[str, str], ...]  # tensor -> SHA-256 of its bytes in the file
    values: tuple[Mapping[str, str], ...]  # tensor -> the same in the pool's dtype
    constant: tuple[frozenset[str], ...]  # tensors that are one repeated value
    nonfinite: tuple[Mapping[str, str], ...]  # tensor -> how many values are NaN or infinite
    gram: Tensor  # (K, K) float64: inner products over what differs; their origin is the same for all ingredients
    repeated: Mapping[str, Tensor]  # the same of each tensor with the content of an earlier one, not in `gram`
    squares: Mapping[str, Tensor]  # tensor -> (K,) float64: sums of squares

    def part(self, chosen: Sequence[int]) -> Scan:
        """The same of some ingredients."""
        index = torch.tensor(chosen)
        return Scan(
            self.measured,
            tuple(self.digests[k] for k in chosen),
            tuple(self.stored[k] for k in chosen),
            tuple(self.values[k] for k in chosen),
            tuple(self.constant[k] for k in chosen),
            tuple(self.nonfinite[k] for k in chosen),
            self.gram[index][:, index],
            {name: gram[index][:, index] for name, gram in self.repeated.items()},
            {name: squares[index] for name, squares in self.squares.items()},
        )


def scan(
    checkpoints: Sequence[Checkpoint],
    specs: Mapping[str, TensorSpec],
    listen: Listener,
    *,
    left_out: frozenset[str] = frozenset(),
    hashes_only: bool = False,
) -> Scan:
    """Read everything once. `left_out` are tensors that distances do not count."""
    return _Pass(checkpoints, specs, listen, left_out, hashes_only).run()


def raw_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, row-major: a view where it is contiguous, else a copy."""
    # A single number counts as contiguous whatever its stride, which `view` does not accept.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Pass:
    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        specs: Mapping[str, TensorSpec],
        listen: Listener,
        left_out: frozenset[str],
        hashes_only: bool,
    ) -> None:
        self.checkpoints, self.specs, self.listen = checkpoints, specs, listen
        self.left_out, self.hashes_only = left_out, hashes_only
        models = range(len(checkpoints))
        self.stored: list[dict[str, str]] = [{} for _ in models]
        self.values: list[dict[str, str]] = [{} for _ in models]
        self.constant: list[set[str]] = [set() for _ in models]
        self.nonfinite: list[dict[str, str]] = [{} for _ in models]
        self.squares: dict[str, Tensor] = {}
        self.gram = torch.zeros(len(models), len(models), dtype=torch.float64)
        self.seen: set[tuple[object, ...]] = set()
        self.repeated: dict[str, Tensor] = {}
        self.total = sum(c.specs[name].nbytes for c in checkpoints for name in specs)
        self.done = self.next_event = 0

    def run(self) -> Scan:
        workers = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="stockpot-scan")
        waiting: deque[tuple[str, _Tensor]] = deque()
        held = 0  # bytes in the blocks of those that wait
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # torch's own threads would stand in the way of ours
        self._tell(0)
        try:
            for name, spec in self.specs.items():
                tensor = _Tensor([c.tensor(name) for c in self.checkpoints], spec.dtype)
                self._follow(tensor, workers)
                waiting.append((name, tensor))
                held += min(tensor.nbytes, BLOCK)
                while held > 2 * BLOCK or len(waiting) > _WAITING:
                    held -= min(waiting[0][1].nbytes, BLOCK)
                    self._finish(*waiting.popleft())
            while waiting:
                self._finish(*waiting.popleft())
        finally:
            workers.shutdown(cancel_futures=True)  # on Ctrl-C do not finish gigabytes first
            torch.set_num_threads(threads)
        return self._result()

    def _follow(self, tensor: _Tensor, workers: ThreadPoolExecutor) -> None:
        """Hash and sum one tensor of all ingredients; the work on its last block is not waited for."""
        here = tensor.nbytes < _INLINE
        for blocks in tensor.blocks():
            tensor.wait()  # SHA-256 takes the blocks in their order
            for k, block in enumerate(blocks):
                tensor.do(None if here else workers, tensor.hash, k, block)
            if not tensor.floating or self.hashes_only:
                continue
            flat = [torch.view_as_real(b).reshape(-1) if b.is_complex() else b for b in blocks]
            width = max(CHUNK // len(flat), 1)
            for start in range(0, flat[0].numel(), width):
                chunks = [part[start : start + width] for part in flat]
                tensor.do(None if here else workers, tensor.sum_up, chunks)

    def _finish(self, name: str, tensor: _Tensor) -> None:
        tensor.wait()
        stored = [made.hexdigest() for made in tensor.stored]
        values = [made.hexdigest() for made in tensor.values]
        for k in range(len(self.checkpoints)):
            self.stored[k][name], self.values[k][name] = stored[k], values[k]
            if tensor.constant[k]:
                self.constant[k].add(name)
        for k in tensor.counts.sum(dim=0).nonzero().flatten().tolist():
            counts = zip(tensor.counts[:, k].tolist(), ("NaN", "infinite"), strict=True)
            text = " and ".join(f"{count} {what}" for count, what in counts if count)
            self.nonfinite[k][name] = f"{text} of {self.specs[name].numel}"
        if tensor.floating and name not in self.left_out and len({*values}) > 1:
            content = (*(c.specs[name] for c in self.checkpoints), *stored)
            if content in self.seen:
                self.repeated[name] = tensor.gram
            else:
                self.seen.add(content)
                self.gram += tensor.gram
        if tensor.floating:
            self.squares[name] = tensor.squares
        self._tell(tensor.nbytes)

    def _result(self) -> Scan:
        pairs = zip(self.checkpoints, self.stored, strict=True)
        return Scan(
            not self.hashes_only,
            tuple(_digest(checkpoint.specs, hashes) for checkpoint, hashes in pairs),
            tuple(self.stored),
            tuple(self.values),
            tuple(frozenset(names) for names in self.constant),
            tuple(self.nonfinite),
            self.gram,
            self.repeated,
            self.squares,
        )

    def _tell(self, nbytes: int) -> None:
        """Progress at a rate that a log can bear."""
        self.done += nbytes
        if self.done >= self.next_event:
            progress(self.listen, "hash", self.done, self.total)
            step = max(self.total // _EVENTS, 1)
            self.next_event = min(self.done + step, max(self.total, self.done + 1))


# Of a chunk: squares (K,), counts of NaN and infinity (2, K) where there are some, inner products (K, K) where
# ingredients differ.
_Sums = tuple[Tensor, Tensor | None, Tensor | None]


class _Tensor:
    """One tensor of all K ingredients on its way through the pass."""

    def __init__(self, parts: list[Tensor], dtype: torch.dtype) -> None:
        self.parts, self.dtype = [part.squeeze() for part in parts], dtype
        self.floating = dtype.is_floating_point or dtype.is_complex
        self.nbytes = sum(part.numel() * part.dtype.itemsize for part in parts)
        self.stored = [hashlib.sha256() for _ in parts]
        self.values = [
            made if part.dtype == dtype else hashlib.sha256() for part, made in zip(parts, self.stored, strict=True)
        ]
        self.constant = [part.numel() > 0 for part in parts]
        self._first: dict[int, Tensor] = {}  # bytes of the first value
        self.counts = torch.zeros(2, len(parts), dtype=torch.int64)  # of NaN and of infinite values
        self.gram = torch.zeros(len(parts), len(parts), dtype=torch.float64)  # (K, K)
        self.squares = torch.zeros(len(parts), dtype=torch.float64)  # (K,)
        self._jobs: list[Future[_Sums | None]] = []

    def blocks(self) -> Iterator[list[Tensor]]:
        """The same stretch of every part, flat, one stretch after the other."""
        numel = self.parts[0].numel()
        step = max(BLOCK * numel // max(self.nbytes, 1), 1)
        for start in range(0, numel, step):
            yield [_stretch(part, start, min(start + step, numel)) for part in self.parts]

    def hash(self, k: int, block: Tensor) -> None:
        raw = raw_bytes(block)
        self.stored[k].update(raw.numpy().data)  # releases the interpreter's lock
        if self.values[k] is not self.stored[k]:
            self.values[k].update(raw_bytes(block.to(self.dtype)).numpy().data)
        if self.constant[k]:
            rows = raw.view(block.numel(), -1)  # (values, bytes of one)
            first = self._first.setdefault(k, rows[0])
            self.constant[k] = torch.equal(rows[-1], first) and torch.equal(rows, first.expand_as(rows))

    def sum_up(self, chunks: list[Tensor]) -> _Sums:
        """Inner products of the *centred* ingredients in fp64.

        Fine-tunes of one model are close to each other and far from zero; centring first is what keeps the
        subtraction in |x|^2 + |y|^2 - 2<x, y> from losing digits.
        """
        same = _equal(chunks)
        rows = torch.stack([chunk.double() for chunk in (chunks[:1] if same else chunks)])  # (K or 1, width)
        squares = rows.square().sum(dim=1)  # (K,) or (1,)
        if bool(squares.isfinite().all()):
            centre = rows.mean(dim=0)
            counts = None
        else:  # whoever is not finite here must not spoil the origin of the others
            sound = squares.isfinite()
            centre = rows[sound].sum(dim=0) / max(int(sound.sum()), 1)
            counts = torch.stack([rows.isnan().sum(dim=1), rows.isinf().sum(dim=1)])  # (2, K) or (2, 1)
        if same:
            return squares, counts, None
        rows -= centre
        return squares, counts, rows @ rows.T

    def do(self, workers: ThreadPoolExecutor | None, work: Callable[..., _Sums | None], *arguments: Any) -> None:
        if workers is None:
            self._take(work(*arguments))
        else:
            self._jobs.append(workers.submit(work, *arguments))

    def wait(self) -> None:
        """Until all work is done. Sums are added in the order of the numbers, whichever thread was first."""
        for job in self._jobs:
            self._take(job.result())
        self._jobs = []

    def _take(self, sums: _Sums | None) -> None:
        if sums is not None:
            squares, counts, gram = sums
            self.squares += squares
            if counts is not None:
                self.counts += counts
            if gram is not None:
                self.gram += gram


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


def _digest(specs: Mapping[str, TensorSpec], hashes: Mapping[str, str]) -> str:
    total = hashlib.sha256()
    for name in sorted(specs):
        spec = specs[name]
        line = json.dumps([name, dtype_name(spec.dtype), list(spec.shape), hashes[name]], ensure_ascii=True)
        total.update(line.encode() + b"\n")
    return total.hexdigest()
