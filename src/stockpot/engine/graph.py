"""The whole inner step as one CUDA graph: mix, forward, backward, project, optimiser.

Small models are bound by the host's launches; a graph launches once. A loss or gradient that is not finite makes the
fused optimiser skip its update on the device, so that losses need to be looked at only once per burst.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stockpot.engine import parallel
from stockpot.engine.descent import Choices, Descent, Step
from stockpot.engine.directions import Directions
from stockpot.engine.feed import Feed
from stockpot.engine.live import Live
from stockpot.task import Data


class GraphDescent(Descent):
    """Captured once and reused for every block of the same shape (see `restart`)."""

    burst = 50
    path = "CUDA graph"

    def __init__(
        self,
        live: Live,
        directions: Directions,
        fixed: Tensor,
        raw: Tensor,
        temperature: float | None,
        choices: Choices,
        steps: int,
        feed: Feed,
        *,
        low_memory: bool = False,
    ) -> None:
        self._rate = torch.tensor(choices.lr, dtype=torch.float32, device=live.device)
        super().__init__(live, directions, fixed, raw, temperature, choices, steps, low_memory=low_memory)
        self.feed = feed
        rates = [*self.rates, 0.0]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=live.device)  # (steps + 1,)
        self._log = torch.zeros(2, len(rates), dtype=torch.float32, device=live.device)  # loss, skipped
        self._counter = torch.zeros(1, dtype=torch.long, device=live.device)
        self._graph = self._capture()

    def can_restart(
        self, live: Live, directions: Directions, fixed: Tensor, raw: Tensor, steps: int, feed: Feed
    ) -> bool:
        """Whether the captured graph reads and writes exactly these tensors."""
        own = self.directions
        return (
            live is self.live
            and feed is self.feed
            and len(self.rates) == steps
            and raw.shape == self.raw.shape
            and fixed.data_ptr() == self.fixed.data_ptr()
            and directions.rows.data_ptr() == own.rows.data_ptr()
            and directions.rows.shape == own.rows.shape
            and directions.scale is None
            and own.scale is None
        )

    def restart(self, raw: Tensor, temperature: float | None) -> None:
        """Begin another block or fold with fresh optimiser state."""
        self.go_back(raw, temperature, 0)

    def _forget(self) -> None:
        with torch.no_grad():  # in place: the graph has these addresses
            for entries in self.optimizer.state.values():
                for value in entries.values():
                    if isinstance(value, Tensor):
                        value.zero_()

    def slow(self, factor: float) -> None:
        if factor != self.factor:
            super().slow(factor)
            rates = [rate * factor for rate in self.rates] + [0.0]
            self._rates.copy_(torch.tensor(rates, dtype=torch.float32))

    def run(self, data: Data, batches: list[Tensor]) -> list[Step]:
        self._counter.fill_(self.done)
        for indices in batches:
            self.feed.put(data.rows(indices))
            self._graph.replay()
        losses, skipped = self._log[:, self.done : self.done + len(batches)].tolist()
        self.done += len(batches)
        return [Step(loss, bool(flag)) for loss, flag in zip(losses, skipped, strict=True)]

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.done = int(values["done"])
        with torch.no_grad():  # in place: the graph has these addresses
            self.raw.copy_(tensors["raw"])
            if self.temperature is not None:
                self.temperature.copy_(tensors["temperature"])
            if self.trail is not None:
                self.trail.restore(tensors)
            entries = list(self.optimizer.state.values())
            for name, tensor in tensors.items():
                if name.startswith("optimizer."):
                    _, number, key = name.split(".", 2)
                    entries[int(number)][key].copy_(tensor)

    def _optimizer(self) -> torch.optim.Optimizer:
        c, groups = self.choices, self._groups()
        for group in groups:
            group["lr"] = self._rate  # the very tensor that the graph writes
        if c.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self._rate, momentum=c.momentum, fused=True)
        return torch.optim.AdamW(groups, lr=self._rate, fused=True, capturable=True)

    def _once(self) -> None:
        loss = self._backward(self.feed.batches, sum(self.feed.sizes))
        with torch.no_grad():
            self._rate.copy_(self._rates[self._counter].squeeze())
            skipped = (~torch.isfinite(self._health(loss))).float()
            self._log.index_copy_(1, self._counter, torch.stack([loss.float(), skipped]).view(2, 1))
            self._counter += 1
        self._clip()
        self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.trail is not None:
            self.trail.add(skipped)

    def _capture(self) -> torch.cuda.CUDAGraph:
        assert not parallel.active()
        self.feed.put(torch.arange(sum(self.feed.sizes)))
        before = self.raw.detach().clone()
        temperature = None if self.temperature is None else float(self.temperature.detach())
        stream = torch.cuda.Stream(self.live.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.live.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries set themselves up, the optimiser makes its state
                self._once()
        torch.cuda.current_stream(self.live.device).wait_stream(stream)
        torch.cuda.synchronize(self.live.device)
        self.live.clear_gradient()
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._once()
        self.go_back(before, temperature, 0)
        return graph
