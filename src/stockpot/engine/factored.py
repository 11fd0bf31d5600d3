"""A live model of LoRA adapters whose flat vector holds coefficients in place of the tensors they change.

All that is done with theta is linear in it. So for every group of the layout the vector holds c[k, j], one number for
each adapter k, and whatever of the group is a full tensor. Ingredient k is then a unit vector there, the mean is 1/K,
projecting the gradient is c_grad_k - mean(c_grad), and mixing sets c, which the model's wide adapters (engine/wide.py)
read. No delta is ever made. These numbers must not be rounded: an error would be the same for all tensors of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor, nn

from stockpot.engine.directions import FlatPlan, Slot
from stockpot.engine.live import Live
from stockpot.engine.wide import Wide, replaced
from stockpot.errors import TaskError
from stockpot.layout import EXCLUDED, Layout
from stockpot.pool import Pool, TensorSpec
from stockpot.task import Task

_COEFFICIENTS = "coefficients of "


class FactoredLive(Live):
    """On exit the model has the base's weights wherever there were factors.

    Where the base is divided among ranks, factors and coefficients are whole on each. A coefficient's gradient is that
    of the rank's own samples, a row's that of all: both add up over the ranks.
    """

    factored = True

    def __init__(
        self, task: Task, pool: Pool, layout: Layout, wide: Mapping[str, Wide], quantised: frozenset[str] = frozenset()
    ) -> None:
        self._quantised = quantised  # weights of the model that are codes: they stay what they are
        tied = {name for names in layout.tied for name in names}
        self.wide = [one for name, one in wide.items() if name in layout.group_of and name not in tied]
        self.beside = sum(one.nbytes for one in self.wide)
        super().__init__(task, pool, layout)
        start = {slot.group: slot.start for slot in self.plan.slots if _is_coefficients(slot)}
        places = [start[layout.group_of[one.name]] + one.owner for one in self.wide]
        index = torch.cat([*places, torch.zeros(0, dtype=torch.long)])  # (N,) N ranks of all modules together
        self._index = index.to(self.device)
        scales = [one.scale for one in self.wide]
        self._scale = torch.cat([*scales, torch.zeros(0)]).to(self.device, self.dtype)  # (N,)
        self._c = torch.zeros(len(index), dtype=self.dtype, device=self.device)  # (N,) what the modules read
        self._leaves = [part.detach() for part in torch.split(self._c, [len(one.owner) for one in self.wide])]
        self._used, self._ranks = (found.to(self.device) for found in _places(index))
        self._stack = ExitStack()

    def _planned(self, align: int) -> FlatPlan:
        layout, K = self.layout, len(self.pool)
        factored = {one.name for one in self.wide}
        group_of = {name: group for name, group in layout.group_of.items() if name not in factored}
        specs = {name: self._spec(name) for name in group_of}
        for one in self.wide:
            group = layout.group_of[one.name]
            group_of[_COEFFICIENTS + layout.groups[group]] = group
            specs[_COEFFICIENTS + layout.groups[group]] = TensorSpec(self.dtype, (K,))
        return FlatPlan.of(replace(layout, group_of=group_of), specs, align)

    def _value(self, k: int, slot: Slot) -> Tensor:
        if not _is_coefficients(slot):
            return super()._value(k, slot)
        unit = torch.zeros(slot.shape, dtype=self.dtype)
        unit[k] = 1.0
        return unit

    def _enter(self) -> None:
        kept = {name for name, reason in self.layout.kept.items() if reason != EXCLUDED}
        check_no_codes(self._quantised - {one.name for one in self.wide} - kept)
        super()._enter()
        adapters = self.pool.adapters
        assert adapters is not None
        for one in self.wide:
            self.put(one.name, adapters.base.tensor(one.name))
        for leaf in self._leaves:
            leaf.requires_grad_(True)
        pairs = zip(self.wide, self._leaves, strict=True)
        self._stack.enter_context(replaced([(one.module, one.forward(c, one.module.forward)) for one, c in pairs]))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        super().__exit__(kind, error, trace)

    def put(self, name: str, value: Tensor) -> None:
        if name not in self._quantised:
            super().put(name, value)

    def push_copies(self) -> None:
        super().push_copies()
        with torch.no_grad():
            torch.index_select(self.flat, 0, self._index, out=self._c)
            self._c.mul_(self._scale)

    def count_once(self) -> None:
        """Set all coefficients to one, for modules that hold the factors of a soup."""
        for slot in self.plan.slots:
            if _is_coefficients(slot):
                self.theta[slot.start : slot.stop] = 1.0

    def clear_gradient(self) -> None:
        super().clear_gradient()
        for leaf in self._leaves:
            leaf.grad = None

    def collect_gradient(self) -> Tensor:
        parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves]
        total = super().collect_gradient()
        if parts:
            by_rank = torch.cat(parts) * self._scale  # (N,)
            # Gathered and summed, not scattered: the same bits every time.
            padded = torch.cat([by_rank, by_rank.new_zeros(1)])
            total[self._used] = padded[self._ranks].sum(dim=1)
        return total


_HELD = "_stockpot_soup"  # where a model keeps what holds a soup in it


def hold(live: Live) -> Live:
    """Leave a soup in a model whose own weights cannot hold it: until `release`, its adapters stay beside them."""
    vars(live.task.model)[_HELD] = live.__enter__()
    return live


def release(model: nn.Module) -> None:
    """Take off what an earlier `hold` left: adapters of two soups would add up."""
    if (live := vars(model).pop(_HELD, None)) is not None:
        live.__exit__(None, None, None)


def check_no_codes(names: Iterable[str]) -> None:
    """Refuse to mix what the model holds as codes."""
    if found := sorted(names):
        raise TaskError.of(
            f"model tensor {found[0]}",
            expected="numbers: its adapters cannot stay beside it as factors",
            found=f"quantised weights ({len(found)} such tensors)",
            fix="load the model without quantisation",
        )


def _is_coefficients(slot: Slot) -> bool:
    return slot.names[0].startswith(_COEFFICIENTS)


def _places(index: Tensor) -> tuple[Tensor, Tensor]:
    """Places (U,) of the flat vector that ranks belong to, and which ranks: (U, most), N where there are fewer."""
    used, counts = torch.unique(index, return_counts=True)
    order = torch.argsort(index, stable=True)
    most = int(counts.max()) if len(counts) else 0
    first = counts.cumsum(0) - counts
    column = torch.arange(most)
    inside = column < counts[:, None]  # (U, most)
    ranks = torch.full((len(used), most), len(index))
    ranks[inside] = order[(first[:, None] + column)[inside]]
    return used, ranks
