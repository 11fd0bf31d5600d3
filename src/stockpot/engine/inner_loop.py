"""How the steps of a block are taken: one after the other, or captured once as a CUDA graph and replayed.

A step is a function of its variables (below), a rate and a batch that changes the variables in place and returns
(loss, skipped), both on the device. Small models are bound by the host's launches; a graph launches once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stockpot.engine import distributed
from stockpot.engine.device_batches import DeviceBatches
from stockpot.engine.live import Live
from stockpot.task import Data


class Batch(NamedTuple):
    """This rank's pieces of a batch, on the device, and how many samples all ranks have together."""

    pieces: list[Any]
    size: int


class Step(NamedTuple):
    """What one step found."""

    loss: float  # of its batch, before the step
    skipped: bool  # something was not finite, and nothing was changed


@dataclass
class Variables:
    """What steps change, each (n,) or a scalar; n = b * G, and one more where beta is learned."""

    x: Tensor  # the coefficients, flat, then beta
    m: Tensor  # AdamW's first moment
    v: Tensor  # AdamW's second moment
    count: Tensor  # steps AdamW has taken
    total: Tensor  # sum of x over the steps since a driver last asked for their mean
    taken: Tensor  # how many those are

    @classmethod
    def fresh(cls, x: Tensor) -> Variables:
        """At x, before any step."""
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        return cls(x, torch.zeros_like(x), torch.zeros_like(x), zero, torch.zeros_like(x), zero.clone())

    def load(self, values: Mapping[str, Tensor]) -> None:
        for field in fields(self):
            getattr(self, field.name).copy_(values[field.name])

    def save(self) -> dict[str, Tensor]:
        """Copies on the host."""
        return {field.name: getattr(self, field.name).to("cpu", copy=True) for field in fields(self)}


TakeStep = Callable[[Variables, Tensor, Batch], Tensor]  # (variables, rate, batch) -> (2,) loss, skipped


class InnerLoop:
    """Steps one by one, in the model's own way; waits for the device after each."""

    burst = 1  # steps worth asking for at once

    def __init__(self, live: Live, step: TakeStep, variables: Variables, data: Data, accumulate: int) -> None:
        self.live, self.step, self.variables = live, step, variables
        self.data, self.accumulate = data, accumulate

    def run(self, batches: Sequence[Tensor], rates: Sequence[float]) -> list[Step]:
        """One step for each batch of indices into the data."""
        found = []
        for indices, rate in zip(batches, rates, strict=True):
            mine = distributed.share(indices)
            pieces = mine.chunk(min(self.accumulate, max(1, len(mine))))
            batch = Batch(
                [self.live.task.to_device(self.data.batch(p)) for p in pieces if len(p)], len(indices)
            )
            value = torch.tensor(rate, dtype=self.variables.x.dtype, device=self.variables.x.device)
            loss, skipped = self.step(self.variables, value, batch).tolist()
            found.append(Step(loss, bool(skipped)))
        return found


class CapturedLoop(InnerLoop):
    """The same steps as one CUDA graph: the host looks at losses once per burst."""

    burst = 50

    def __init__(self, live: Live, step: TakeStep, variables: Variables, feed: DeviceBatches) -> None:
        self.live, self.step, self.variables, self.feed = live, step, variables, feed
        self.data: Data
        device = live.device
        self._rates = torch.zeros(self.burst, dtype=variables.x.dtype, device=device)
        self._log = torch.zeros(self.burst, 2, dtype=torch.float32, device=device)  # loss, skipped
        self._counter = torch.zeros(1, dtype=torch.long, device=device)
        self._batch = Batch([batch for batch, _ in feed.batches], sum(feed.sizes))
        self._graph = self._capture()

    def run(self, batches: Sequence[Tensor], rates: Sequence[float]) -> list[Step]:
        self._counter.zero_()
        self._rates[: len(rates)].copy_(torch.tensor(rates, dtype=self._rates.dtype))
        for indices in batches:
            self.feed.put(self.data.rows(indices))
            self._graph.replay()
        return [Step(loss, bool(skipped)) for loss, skipped in self._log[: len(batches)].tolist()]

    def _once(self) -> None:
        rate = self._rates.index_select(0, self._counter).squeeze(0)
        found = self.step(self.variables, rate, self._batch)
        self._log.index_copy_(0, self._counter, found.float().view(1, 2))
        self._counter += 1

    def _capture(self) -> torch.cuda.CUDAGraph:
        before = self.variables.save()
        self.feed.put(torch.arange(sum(self.feed.sizes)))
        stream = torch.cuda.Stream(self.live.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.live.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries set themselves up
                self._once()
        torch.cuda.current_stream(self.live.device).wait_stream(stream)
        torch.cuda.synchronize(self.live.device)
        self.live.clear_gradient()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._once()
        self.variables.load(before)
        return graph
