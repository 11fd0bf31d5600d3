"""Batches at fixed places on the device, for a captured graph to read.

Data whose columns fit is kept on the device as it is (uint8 images, token ids) and gathered there; otherwise it is
gathered in host memory into pinned buffers (see `gather`) and copied while the device works on the step before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stockpot.engine.gather import Gather
from stockpot.task import Data
from stockpot.task.batches import leaves, refill


class Feed:
    """Serves all views of the same samples: `put` takes places in `data.columns` (see `Data.rows`)."""

    def __init__(self, data: Data, device: torch.device, size: int, pieces: int, resident: bool) -> None:
        self.device = device
        self.sizes = [len(p) for p in torch.arange(size).chunk(pieces)]
        self.resident = resident
        example = data.batch(torch.zeros(sum(self.sizes), dtype=torch.long))
        self._whole = [torch.empty_like(leaf, device=device) for _, leaf in leaves(example)]
        # The model reads pieces of one batch: views, so that one copy fills them all.
        self.batches: list[tuple[Any, int]] = []
        at = 0
        for size in self.sizes:
            self.batches.append((refill(example, [leaf[at : at + size] for leaf in self._whole]), size))
            at += size
        self._columns = [column for _, column in leaves(data.columns)]
        if resident:
            self._columns = [column.to(device) for column in self._columns]
        else:
            self._pinned = [
                [torch.empty_like(leaf).pin_memory() for _, leaf in leaves(example)] for _ in range(2)
            ]
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
