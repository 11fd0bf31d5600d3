"""Pieces of checkpoints on a CUDA device, read ahead of their use by several threads.

One thread copies from a memory-mapped file at a few gigabytes a second, far below the bus; several fill a ring of
pinned buffers in turn. The order of the pieces is the order they were asked for.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor

from stockpot.engine.live import Live

BUFFERS = 8
CHUNK = 1 << 15  # parameters torch copies without starting threads of its own


class Reader:
    def __init__(self, live: Live, widest: int, stream: torch.cuda.Stream) -> None:
        self.live = live
        self._stream = stream
        self._pinned = [torch.empty(widest, pin_memory=True) for _ in range(BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        self._arrived = torch.empty(widest, device=live.device)

    def pieces(self, wanted: Iterable[tuple[int, int, int]]) -> Generator[Tensor, None, None]:
        """(ingredient, from, to) on the device, one after the other; iterate on the reader's stream.

        A piece is overwritten, in the order of the stream, when the next one is asked for.
        """
        todo = iter(wanted)
        waiting: deque[tuple[int, int, Future[Tensor]]] = deque()
        threads = ThreadPoolExecutor(min(BUFFERS, os.cpu_count() or 1), "stockpot-read")
        try:
            for turn, (k, lo, hi) in enumerate(islice(todo, BUFFERS)):
                waiting.append((turn, hi - lo, threads.submit(self._read, turn, k, lo, hi)))
            while waiting:
                turn, size, job = waiting.popleft()
                arrived = self._arrived[:size]
                arrived.copy_(job.result(), non_blocking=True)
                self._copied[turn].record(self._stream)
                for k, lo, hi in islice(todo, 1):
                    waiting.append((turn, hi - lo, threads.submit(self._read, turn, k, lo, hi)))
                yield arrived
        finally:
            threads.shutdown(cancel_futures=True)

    def _read(self, turn: int, k: int, lo: int, hi: int) -> Tensor:
        self._copied[turn].synchronize()  # the copy that used this buffer is over
        return self.live.read_range(k, lo, hi, self._pinned[turn][: hi - lo], CHUNK)
