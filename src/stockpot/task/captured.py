"""A function of a batch captured once as a CUDA graph, and the batches that it reads at fixed places on the device.

Small models are bound by the host's launches; a graph launches once. Data whose columns fit is kept on the device as it
is (uint8 images, token ids) and gathered there; otherwise it is gathered in host memory into pinned buffers and copied
while the device works on the batch before. A batch of images is tens of megabytes scattered over gigabytes: several
threads gather it, or a slow host would need longer than the step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stockpot.task.batches import leaves, refill
from stockpot.task.data import Data


class Batch(NamedTuple):
    """This rank's pieces of a batch, on the device, and how many samples all ranks have together."""

    pieces: list[Any]
    size: int
    idle: int = 0  # pieces at the end that count for nothing


class Captured:
    """What `function` does, as one graph; `found` is what it returns, and every replay writes there again."""

    def __init__(
        self,
        function: Callable[[], Any],
        device: torch.device,
        *,
        between: Callable[[], None] = lambda: None,
        pool: Any = None,
    ) -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries set themselves up
                function()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        between()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.found = function()

    @property
    def pool(self) -> Any:
        """The memory of the graph, for others that are never at work at the same time."""
        return self._graph.pool()

    def __call__(self) -> Any:
        self._graph.replay()
        return self.found


THREADS = 4
SMALL = 1 << 20  # bytes of a batch below which threads do not pay


class DeviceBatches:
    """Serves all views of the same samples: `put` takes places in `data.columns` (see `Data.rows`)."""

    def __init__(
        self, data: Data, device: torch.device, size: int, pieces: int = 1, columns: list[Tensor] | None = None
    ) -> None:
        """`columns`: those of the data where they lie on the device (`on_device`); None: they stay on the host."""
        self.device = device
        self.resident = columns is not None
        example = data.batch(torch.zeros(size, dtype=torch.long))
        self._whole = [torch.empty_like(leaf, device=device) for _, leaf in leaves(example)]
        # The model reads pieces of one batch: views, so that one copy fills them all.
        cut = zip(*(leaf.chunk(pieces) for leaf in self._whole), strict=True)
        self.batch = Batch([refill(example, piece) for piece in cut], size)
        self._columns = [column for _, column in leaves(data.columns)] if columns is None else columns
        if columns is None:
            self._pinned = [[torch.empty_like(leaf).pin_memory() for _, leaf in leaves(example)] for _ in range(2)]
            self._stage = [[torch.empty_like(leaf) for leaf in self._whole] for _ in range(2)]
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._ready = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
            self._taken = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
            self._turn = 0
            self._gather = Gather()

    def put(self, rows: Tensor) -> None:
        """Make this the batch the graph reads, in the order of the current stream."""
        if self.resident:
            there = rows.to(self.device, non_blocking=True)
            for column, target in zip(self._columns, self._whole, strict=True):
                torch.index_select(column, 0, there, out=target)
            return
        turn = self._turn
        self._turn = 1 - turn
        self._ready[turn].synchronize()  # the copy that used these pinned buffers is over
        for column, pinned in zip(self._columns, self._pinned[turn], strict=True):
            self._gather(column, rows, pinned)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._taken[turn])
            for pinned, stage in zip(self._pinned[turn], self._stage[turn], strict=True):
                stage.copy_(pinned, non_blocking=True)
            self._ready[turn].record(self._stream)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self._ready[turn])
        for stage, target in zip(self._stage[turn], self._whole, strict=True):
            target.copy_(stage)
        self._taken[turn].record(current)

    def close(self) -> None:
        if not self.resident:
            self._gather.close()


class Gather:
    """Copies rows of a host column together, on several threads where that pays."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def __call__(self, column: Tensor, rows: Tensor, out: Tensor) -> None:
        """out[i] = column[rows[i]], both on the host."""
        if out.nbytes < SMALL or not column.is_contiguous() or not out.is_contiguous():
            torch.index_select(column, 0, rows, out=out)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "stockpot-gather")
        source, target, order = _bytes(column), _bytes(out), rows.numpy()
        jobs = [
            # With "clip" numpy writes straight into the target; rows were drawn from the column's own length.
            self._threads.submit(source.take, order[s], 0, target[s[0] : s[-1] + 1], "clip")
            for s in np.array_split(np.arange(len(order)), THREADS)
            if len(s)
        ]
        for job in jobs:
            job.result()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def _bytes(tensor: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """(rows, bytes of a row): numpy does not know every dtype, but it knows bytes."""
    view: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()
    return view
