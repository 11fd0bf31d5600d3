"""A live model that FSDP2 has divided among ranks: the flat vector holds this rank's rows of every mixed tensor.

All that is done with theta is linear, so each rank does it to its own rows: reading and mixing need no other rank, and
projections of the rows' gradients add up to that of the whole. Rows are cut from the mapped files: a rank reads its own
pages and no others.
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from stockpot import ranks
from stockpot.engine.factored import FactoredLive
from stockpot.engine.flat import Slot
from stockpot.engine.live import Live, _named
from stockpot.errors import TaskError
from stockpot.layout import Layout
from stockpot.pool import Pool, TensorSpec
from stockpot.task import Task


class ShardedLive(Live):
    """The model stays divided on exit, with its last values."""

    sharded = True

    def __init__(self, task: Task, pool: Pool, layout: Layout, *factors: Any) -> None:
        held = _named(task.model, pool.specs)
        together = {name: names for names in layout.tied for name in names}
        self._held: dict[str, Tensor] = {}  # by mixed name, which may be another than the model's where it is tied
        for name in layout.group_of:
            self._held[name] = next(held[other] for other in (name, *together.get(name, ())) if other in held)
            if not isinstance(self._held[name], nn.Parameter):
                raise TaskError.of(
                    f"model tensor {name} for shards",
                    expected="a parameter, or the same values in all ingredients",
                    found="a buffer that is mixed, of which every rank has all",
                    fix=f"keep one ingredient's with exclude={name!r}, or leave out parallel: shards",
                )
        super().__init__(task, pool, layout, *factors)

    def _spec(self, name: str) -> TensorSpec:
        return replace(super()._spec(name), shape=tuple(ranks.local(self._held[name]).shape))

    def _value(self, k: int, slot: Slot) -> Tensor:
        return self.pool.tensor(k, slot.names[0])[ranks.rows(self._held[slot.names[0]])].reshape(-1)

    def check_bound(self) -> None:
        names, now = (
            {id(tensor): name for name, tensor in self._tensors.items()},
            _named(self.task.model, self.pool.specs),
        )
        for tensor, _, _ in self.bound:
            if now.get(name := names[id(tensor)]) is not tensor:
                raise TaskError.of(
                    f"model tensor {name}",
                    expected="the parameter it had before the forward pass",
                    found="another one: the model assigns a new one while it runs",
                    fix="change the values in place (weight.data.copy_(...), renorm_), or do it outside the model",
                )
        self._tensors = {**self._tensors, **now}

    def _bind(self, tensor: Tensor, start: int, stop: int) -> None:
        self.bound.append((tensor, start, stop))
        tensor.requires_grad_(True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear_gradient()
        for parameter, before in self._frozen_before:
            parameter.requires_grad_(before)

    def put(self, name: str, value: Tensor) -> None:
        if name in self._tensors:
            ranks.fill(self._tensors[name], value)

    def push_copies(self) -> None:
        own = [ranks.local(tensor).view(-1) for tensor, _, _ in self.bound]
        if own:
            with torch.no_grad():
                torch._foreach_copy_(own, [self.flat[start:stop] for _, start, stop in self.bound])


class ShardedFactoredLive(FactoredLive, ShardedLive):
    """Adapters on a base that is divided: factors and coefficients are whole on every rank.

    A coefficient's gradient is that of the rank's own samples, a row's that of all: both add up over the ranks.
    """
