"""Rows of a big column copied together by several threads.

A batch of images is tens of megabytes scattered over gigabytes: one thread of a slow host needs longer for that than
the device for the step.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

THREADS = 4
SMALL = 1 << 20  # bytes of a batch below which threads do not pay


class Gather:
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
        shares = np.array_split(np.arange(len(order)), THREADS)
        jobs = [
            # With "clip" numpy writes straight into the target; rows were drawn from the column's own length.
            self._threads.submit(source.take, order[s], 0, target[s[0] : s[-1] + 1], "clip")
            for s in shares
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
    view: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = (
        tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()
    )
    return view
