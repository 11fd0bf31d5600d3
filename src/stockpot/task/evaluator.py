"""Passes of the live model over samples, at the speed of its forward pass.

The plain meaning is a loop: take the next batch, move it to the device, call a function of it. On a GPU, batches are
copied ahead from pinned memory. While `fast` is on, the data stays on the device where it fits, and the function is
captured as a CUDA graph once and replayed for every full batch. A graph that does not agree with the plain function on
a batch it was not made with is not used, nor is one made of functions that users wrote: what those do outside the
device it would forget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stockpot.errors import TaskError
from stockpot.task.batches import leaves, on_device, refill
from stockpot.task.captured import Captured, DeviceBatches
from stockpot.task.data import Data, forked_random
from stockpot.task.judge import Judge
from stockpot.task.loss import Loss
from stockpot.task.metrics import OURS

Found = tuple[Tensor, ...]
Stop = Callable[[float, int], bool]  # (sum of the statistic, samples done)
LARGEST = 1024  # samples of a batch that was made of several, so that small models fill the device
SHORT = 2 << 30  # bytes that a pass over such a batch may take at most
FEWEST = 6  # full batches in a pass; below, capturing costs more than it saves
SAME = 0.99  # of the numbers that a graph finds must be what the plain function finds
SHARE = 8  # data stays on the device if it takes at most this part of what is free there


class Evaluator:
    """What is kept between passes. A task has one."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.device = judge.device
        self._fast = False
        self._columns: dict[int, tuple[Any, list[Tensor]]] = {}  # by the identity of the data's columns, kept with them
        self._sources: dict[tuple[int, int], DeviceBatches] = {}
        self._graphs: dict[tuple[Any, ...], Captured | None] = {}  # None: it cannot be captured
        self._grown: dict[tuple[Any, ...], int] = {}  # samples of the batches of a pass, by function and data
        self._beta: Tensor | None = None  # where graphs of the loss read it

    @contextmanager
    def fast(self, wanted: bool = True) -> Iterator[None]:
        """Meanwhile many passes will be made, and the device's memory may be used for them."""
        before, self._fast = self._fast, wanted and self.device.type == "cuda"
        try:
            yield
        finally:
            self._fast = before
            self.forget()
            self._columns.clear()

    @property
    def is_fast(self) -> bool:
        return self._fast

    def forget(self) -> None:
        """Let go of the graphs and their batches, as when the model's tensors are about to move."""
        self._graphs.clear()
        self._grown.clear()
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        if not self._fast:
            self._columns.clear()

    # Data ---------------------------------------------------------------------------------------------

    def columns(self, data: Data) -> list[Tensor]:
        """The data's columns on the device; from now on they stay there."""
        key = id(data.columns)
        if key not in self._columns:
            self._columns[key] = data.columns, [column.to(self.device) for _, column in leaves(data.columns)]
        return self._columns[key][1]

    def fits(self, data: Data) -> bool:
        """Whether the data is on the device, or takes little of what is free there."""
        if id(data.columns) in self._columns:
            return True
        return data.columns is not None and data.nbytes < torch.cuda.mem_get_info(self.device)[0] // SHARE

    def batch(self, data: Data, indices: Tensor) -> Any:
        """These samples on the device."""
        if data.columns is not None and id(data.columns) in self._columns:
            rows = data.rows(indices).to(self.device)
            return refill(data.columns, [column[rows] for column in self.columns(data)])
        return on_device(data.batch(indices), self.device)

    def _source(self, data: Data, size: int, samples: int) -> DeviceBatches | None:
        if self.device.type != "cuda" or data.columns is None or samples < FEWEST * size:
            return self._sources.get((id(data.columns), size))
        if not all(isinstance(column, Tensor) and not column.is_cuda for _, column in leaves(data.columns)):
            return None
        key = id(data.columns), size
        if key not in self._sources:
            columns = self.columns(data) if self._fast and self.fits(data) else None
            self._sources[key] = DeviceBatches(data, self.device, size, columns=columns)
        return self._sources[key]

    # Passes -------------------------------------------------------------------------------------------

    def over(
        self,
        function: Callable[[Any, int], Found],
        data: Data,
        rows: Tensor,
        size: int,
        key: object = None,
        grow: bool = False,
    ) -> Iterator[tuple[Tensor, Found]]:
        """The function of these samples, batch by batch; results are to be copied before the next ones are asked for.

        `key` tells functions apart; None: it must not be captured. With `grow`, results do not depend on which samples
        are in a batch together, and batches may be larger. A model may draw numbers even in evaluation mode.
        They depend on the samples, not on what ran before, so that a score is the same again in a run that was
        interrupted.
        """
        if grow and key is not None and self._fast and len(rows) >= 2 * FEWEST * size:
            size = self._larger(function, data, rows, size, key)
        source, graph = self._source(data, size, len(rows)), None
        parts = rows.split(size)  # type: ignore[no-untyped-call]

        def put(part: Tensor) -> Any:
            assert source is not None
            source.put(data.rows(part))
            reseed(int(part[0]))
            return source.batch.pieces[0]

        try:
            with forked_random(self.device) as reseed:
                if self._fast and source is not None and key is not None and len(rows) >= FEWEST * size:
                    name = (key, id(data.columns), size, *self._places())
                    if name not in self._graphs:
                        self._graphs[name] = self._captured(function, parts[:2], put)
                    graph = self._graphs[name]
                for part in parts:
                    if source is None or len(part) < size:
                        batch = self.batch(data, part)
                        reseed(int(part[0]))
                        yield part, function(batch, len(part))
                    elif graph is None:
                        yield part, function(put(part), size)
                    else:
                        put(part)
                        yield part, graph()
        finally:
            if not self._fast:
                self.forget()

    def _larger(self, function: Callable[[Any, int], Found], data: Data, rows: Tensor, size: int, key: object) -> int:
        """As many batches in one as the device's memory and the number of samples allow."""
        most = min(LARGEST, len(rows) // FEWEST) // size
        name = (key, id(data.columns), size, most)
        if name not in self._grown:
            taken, drawn = torch.cuda.memory_allocated(self.device), torch.cuda.get_rng_state(self.device)
            function(self.batch(data, rows[:size]), size)
            if not torch.equal(drawn, torch.cuda.get_rng_state(self.device)):
                most = 1  # it draws numbers, other ones in other batches
            # Or what anything before took, which is more.
            needed = torch.cuda.max_memory_allocated(self.device) - taken
            room = min(SHORT, torch.cuda.mem_get_info(self.device)[0] // SHARE)
            self._grown[name] = size * max(1, min(most, room // max(1, needed)))
        return self._grown[name]

    def _places(self) -> tuple[object, ...]:
        """Where everything lies that a graph of the model reads, and how the model computes with it."""
        model = self.judge.model
        tensors = (*model.parameters(), *model.buffers())
        modes = sum(1 << i for i, module in enumerate(model.modules()) if module.training)
        return id(model), modes, *(tensor.data_ptr() for tensor in tensors)

    def _captured(
        self, function: Callable[[Any, int], Found], parts: tuple[Tensor, ...], put: Callable[[Tensor], Any]
    ) -> Captured | None:
        """The function as a graph, if it can be captured and then does the same on another batch."""
        first, second = parts
        try:
            batch = put(first)
            pool = next((graph.pool for graph in self._graphs.values() if graph is not None), None)
            graph = Captured(lambda: function(batch, len(first)), self.device, pool=pool)
            put(second)
            plain = [each.clone() for each in function(batch, len(second))]
            put(second)
            return graph if all(map(_alike, plain, graph())) else None
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model that cannot be captured: its own code may raise anything
            return None

    # What is asked of them ----------------------------------------------------------------------------

    def table(
        self,
        data: Data,
        rows: Tensor,
        size: int,
        *,
        with_loss: bool,
        grow: bool = False,
        stop: Stop | None = None,
        told: Callable[[int], None] = lambda _: None,
    ) -> tuple[Tensor, Loss]:
        """The metric's statistics of each sample, (N, m), and the loss, NaN where unknown; on the host, in fp64.

        `stop` may end the pass: then the table is that of the first samples. `grow`: see `over`.
        """
        judge = self.judge

        def function(batch: Any, n: int) -> Found:
            table, loss = judge.statistics(batch, n, with_loss)
            return (table,) if loss is None else (table, torch.stack(list(loss)).detach())

        built_in = judge.users_loss is None and not judge.metric.calls_model and judge.metric in OURS
        key = ("statistics", id(judge.metric), with_loss) if built_in else None
        tables: list[Tensor] = []
        losses: list[Tensor] = []
        sums = Sums(self.device)
        done = 0
        for part, (table, *loss) in self.over(function, data, rows, size, key, grow and stop is None):
            tables.append(table.clone())
            losses += [each.clone() for each in loss]
            done += len(part)
            told(done)
            if stop is not None and any(stop(total, count) for total, count in sums.add(table, done)):
                break
        if len(widths := sorted({table.shape[1] for table in tables})) > 1:
            raise TaskError.of(
                f"metric {judge.metric.name}",
                expected="as many statistics of every sample",
                found=f"{widths[0]} in one batch and {widths[-1]} in another",
                fix="let their number depend on nothing in a batch, such as num_classes in torch's one_hot",
            )
        unknown = torch.tensor([math.nan, 1.0], dtype=torch.float64)
        return on_host(torch.cat(tables)), Loss(*(on_host(torch.stack(losses)).sum(0) if losses else unknown))

    def logits(self, data: Data, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each batch: its samples, and what an ensemble averages, to be copied before the next."""
        rows, key = torch.arange(len(data)), "logits" if self.judge.users_loss is None else None
        for part, (logits,) in self.over(lambda batch, _: (self.judge.averaged(batch),), data, rows, size, key):
            yield part, logits

    def mean_loss(self, data: Data, size: int, beta: Tensor | None) -> float:
        """The mean loss of all samples of the model in its present mode, for losses that add up."""
        if beta is not None:
            self._beta = beta if self._beta is None else self._beta.copy_(beta)
        factor = None if beta is None else self._beta

        def function(batch: Any, _: int) -> Found:
            loss = self.judge.loss(batch, beta=factor)
            return (torch.stack([loss.total, loss.weight.to(loss.total)]).detach(),)

        with torch.no_grad():
            key = ("loss", beta is None)
            found = [each.clone() for _, (each,) in self.over(function, data, torch.arange(len(data)), size, key)]
        total, weight = on_host(torch.stack(found)).sum(0).tolist()
        return float(total / weight) if weight else math.nan


class Sums:
    """The running sum of statistics; on a GPU it is read one batch late, or the device would wait for the host."""

    def __init__(self, device: torch.device) -> None:
        self._late = device.type == "cuda"
        self._total = 0.0
        self._waiting: tuple[Tensor, Any, int] | None = None

    def add(self, table: Tensor, done: int) -> list[tuple[float, int]]:
        """The sums that are known by now, each with the number of samples it is of; `done` includes this table's."""
        if not self._late:
            self._total += float(on_host(table).sum())
            return [(self._total, done)]
        mine = torch.empty((), dtype=torch.float64, pin_memory=True)
        mine.copy_(table.double().sum(), non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        before, self._waiting = self._waiting, (mine, copied, done)
        if before is None:
            return []
        before[1].synchronize()
        self._total += float(before[0])
        return [(self._total, before[2])]


def on_host(tensor: Tensor) -> Tensor:
    """In double precision, which some devices do not have."""
    return tensor.detach().cpu().double()


def _alike(plain: Tensor, replayed: Tensor) -> bool:
    """Equal but for rounding, which may turn a few predictions."""
    same = torch.isclose(plain.double(), replayed.double(), rtol=1e-2, atol=1e-3, equal_nan=True)
    return float(same.double().mean()) >= SAME
