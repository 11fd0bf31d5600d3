"""The user's model with its mixed tensors laid out in one flat vector.

Parameters become views of `flat`, so that mixing writes the model without a copy. `theta` is the soup in the dtype of
the sums (fp32 or better); it is `flat` itself unless the model is narrower (a bf16 model), then `push` rounds it.

Where FSDP2 has divided the model among ranks, `flat` holds this rank's rows of every mixed tensor, and they are copied
to the model. All that is done with theta is linear: reading and mixing rows needs no other rank, and projections of the
rows' gradients add up to that of the whole. Rows are cut from the mapped files: a rank reads its own pages alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor, nn

from stockpot import ranks
from stockpot.engine.directions import ALIGN, FlatPlan, Slot, Tiles
from stockpot.errors import TaskError
from stockpot.events import Listener, ignore, progress
from stockpot.layout import EXCLUDED, FROZEN, Layout, mixing_dtype
from stockpot.names import by_file_names
from stockpot.pool import Pool, TensorSpec
from stockpot.soup.weights import chosen, mix_tensor
from stockpot.task import Task


class Live:
    """Use as a context manager: on exit the model owns its tensors again and keeps their last values.

    A model that is divided stays so.
    """

    factored = False  # whether the vector holds coefficients of adapters (engine/factored.py), which are not rounded
    beside = 0  # bytes of factors on the device

    def __init__(self, task: Task, pool: Pool, layout: Layout) -> None:
        self.task = task
        self.pool = pool
        self.layout = layout
        self.device = task.device
        self.sharded = task.sharded  # whether ranks hold parts of the model
        self._tensors = tensors = _named(task.model, pool.specs)
        if self.sharded:
            self._check_divided()
        cuda = self.device.type == "cuda"
        self.dtype = torch.float32  # of sums and coefficients
        for name in layout.group_of:
            self.dtype = torch.promote_types(self.dtype, mixing_dtype(pool.specs[name].dtype))
        self.plan = self._planned(ALIGN if cuda else 1)
        self.tiles = Tiles.of(self.plan, self.device) if cuda else None
        self._frozen_before = [(p, p.requires_grad) for p in task.model.parameters()]
        kinds = {tensors[n].dtype for slot in self.plan.slots for n in slot.names if n in tensors}
        narrow = len(kinds) == 1 and cuda and not self.factored
        self.flat = self._zeros(next(iter(kinds)) if narrow else self.dtype)  # (P,) what the model is a view of
        self._theta: Tensor | None = self.flat if self.flat.dtype == self.dtype else None
        # What theta_bar and theta_fix are held in: bf16 where checkpoints and model are, as it is all that they have.
        stored = {pool.specs[name].dtype for name in layout.group_of}
        whole_bf16 = self.flat.dtype == torch.bfloat16 and stored == {torch.bfloat16}
        self.soup_dtype = torch.bfloat16 if whole_bf16 else self.dtype
        self._grad: Tensor | None = None
        self.bound: list[tuple[Tensor, int, int]] = []  # tensors of the model and their places
        self.copied: list[tuple[Tensor, int, int]] = []  # those that are not views: another dtype than flat

    def _planned(self, align: int) -> FlatPlan:
        return FlatPlan.of(self.layout, {name: self._spec(name) for name in self.layout.group_of}, align)

    def _spec(self, name: str) -> TensorSpec:
        """What this process holds of a mixed tensor."""
        spec = self.pool.specs[name]
        return replace(spec, shape=tuple(ranks.local(self._held(name)).shape)) if self.sharded else spec

    def _held(self, name: str) -> Tensor:
        """The model's tensor of a mixed name, which may be another than the model's where it is tied."""
        together = next((names for names in self.layout.tied if name in names), ())
        return next(self._tensors[other] for other in (name, *together) if other in self._tensors)

    def _check_divided(self) -> None:
        for name in self.layout.group_of:
            if not isinstance(self._held(name), nn.Parameter):
                raise TaskError.of(
                    f"model tensor {name} for shards",
                    expected="a parameter, or the same values in all ingredients",
                    found="a buffer that is mixed, of which every rank has all",
                    fix=f"keep one ingredient's with exclude={name!r}, or leave out parallel: shards",
                )

    def _value(self, k: int, slot: Slot) -> Tensor:
        """What ingredient k has at this place."""
        value = self.pool.tensor(k, slot.names[0])
        return (value[ranks.rows(self._held(slot.names[0]))] if self.sharded else value).reshape(-1)

    @property
    def places(self) -> object:
        """Where each tensor lies in the flat vector: equal for two layouts whose vectors can be exchanged."""
        return [(slot.names, slot.start) for slot in self.plan.slots]

    def check_bound(self) -> None:
        """Refuse a model whose forward pass gives a mixed tensor other memory: mixing would no longer reach it."""
        first, width = self.flat.data_ptr(), self.flat.element_size()
        names = {id(tensor): name for name, tensor in self._tensors.items()}
        now = _named(self.task.model, self.pool.specs)
        for tensor, start, _ in self.bound:
            name, found, place = names[id(tensor)], None, first + start * width
            if now.get(name) is not tensor:
                found = "another tensor: the model assigns a new one while it runs"
            elif not self.sharded and tensor.dtype == self.flat.dtype and tensor.numel() and tensor.data_ptr() != place:
                found = "other memory: the model assigns to .data while it runs, as max-norm constraints do"
            if found:
                raise TaskError.of(
                    f"model tensor {name}",
                    expected="the memory it had before the forward pass",
                    found=found,
                    fix="change the values in place (weight.data.copy_(...), renorm_), or do it outside the model",
                )
        self._tensors = {**self._tensors, **now}  # of what is not mixed (a counter), the new one is set from now on

    @property
    def theta(self) -> Tensor:
        """(P,) in the dtype of sums; call `push` after writing it."""
        if self._theta is None:
            self._theta = self._zeros(self.dtype)
        return self._theta

    def drop_theta(self) -> None:
        """Free theta where the model does not live in it."""
        if self._theta is not self.flat:
            self._theta = None

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.plan.size, dtype=dtype, device=self.device)

    def __enter__(self) -> Live:
        try:
            self._enter()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _enter(self) -> None:
        places = self._places()  # may refuse; the model is untouched so far
        for parameter in self.task.model.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        for tensor, start, stop in places:
            self._bind(tensor, start, stop)
        self.load_kept()

    def _places(self) -> list[tuple[Tensor, int, int]]:
        """Where each mixed tensor of the model lies in theta; a tensor with two names once."""
        places: list[tuple[Tensor, int, int]] = []
        bound: dict[int, str] = {}  # which name a model tensor has its place under
        differ = "checkpoints in which they differ"
        for slot in self.plan.slots:
            for name in slot.names:
                if name not in self._tensors:
                    continue  # tied in the file, absent in the model
                tensor = self._tensors[name]
                other = bound.setdefault(id(tensor), name)
                if other not in slot.names:
                    raise _torn(name, other, differ)
                if other == name:
                    places.append((tensor, slot.start, slot.stop))
        for name, reason in self.layout.kept.items():
            if name in self._tensors and id(self._tensors[name]) in bound:
                raise _torn(name, bound[id(self._tensors[name])], f"{differ}: {name} is {reason}, not mixed")
        return places

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tensor in self._tensors.values():
            tensor.grad = None
            if not self.sharded and _same_memory(tensor, self.flat):
                tensor.data = tensor.data.clone()
        for parameter, before in self._frozen_before:
            parameter.requires_grad_(before)

    def _bind(self, tensor: Tensor, start: int, stop: int) -> None:
        self.bound.append((tensor, start, stop))
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(True)
        if not self.sharded and tensor.dtype == self.flat.dtype:
            tensor.data = self.flat[start:stop].view(tensor.shape)
        elif not self.sharded:  # all rows are copied at once
            self.copied.append((tensor, start, stop))

    def load_kept(self) -> None:
        """Put the tensors that are not mixed into the model: frozen and excluded ones from the donor."""
        for name, reason in self.layout.kept.items():
            if reason in (FROZEN, EXCLUDED):
                self.put(name, self.pool.tensor(self.layout.donor, name))

    def load_ingredient(self, k: int, read: Callable[[int, Tensor], Tensor] | None = None) -> None:
        """Make the model ingredient k, with its own statistics and integers; `read`: instead of this one's own."""
        read = self.read if read is None else read
        if self._theta is None and not self.copied:
            read(k, self.flat)  # rounds on the way; theta would be twice the model
        else:
            read(k, self.theta)
            self.push()
        for name, reason in self.layout.kept.items():
            if reason not in (FROZEN, EXCLUDED):
                self.put(name, self.pool.tensor(k, name))

    def put(self, name: str, value: Tensor) -> None:
        """Set one tensor that is not mixed, where the model has it."""
        if name in self._tensors:
            ranks.fill(self._tensors[name], value)

    def read(self, k: int, out: Tensor) -> Tensor:
        """Ingredient k as a flat vector. out: (P,)"""
        return self.read_range(k, 0, self.plan.size, out)

    def read_range(self, k: int, lo: int, hi: int, out: Tensor) -> Tensor:
        """Ingredient k between two places of the flat vector. out: (hi - lo,)"""
        end = lo  # everything before this is written
        for slot in self.plan.overlapping(lo, hi):
            start, stop = max(slot.start, lo), min(slot.stop, hi)
            out[end - lo : start - lo].zero_()
            part = self._value(k, slot)[start - slot.start : stop - slot.start]
            out[start - lo : stop - lo].copy_(part)
            end = stop
        out[end - lo : hi - lo].zero_()
        return out

    def mean(self, over: list[int] | None = None, listen: Listener = ignore) -> Tensor:
        """theta-bar of some or all ingredients. (P,)"""
        K = len(self.pool)
        return self.mixed(chosen(K, len(self.layout), range(K) if over is None else over), listen)

    def mixed(self, W: Tensor, listen: Listener = ignore) -> Tensor:
        """The soup of weights W (K, G), streamed tensor by tensor: the same numbers as its file has. (P,)"""
        rows = W.ne(0).any(dim=1).nonzero().flatten().tolist()
        columns = W[rows].T.tolist()  # (G, rows)
        out = self._zeros(self.dtype)
        for slot in self.plan.slots:
            parts = [self._value(k, slot) for k in rows]
            out[slot.start : slot.stop].copy_(mix_tensor(parts, columns[slot.group]).view(-1))
            progress(listen, "averaging the ingredients", slot.stop, self.plan.size, "parameters")
        return out

    def push(self) -> None:
        """Make the model follow theta where it is not a view of it."""
        if self._theta is not None and self._theta is not self.flat:
            self.flat.copy_(self._theta)
        self.push_copies()

    def push_copies(self) -> None:
        if self.sharded:
            own = [ranks.local(tensor).view(-1) for tensor, _, _ in self.bound]
            with torch.no_grad():
                _copy(own, [self.flat[start:stop] for _, start, stop in self.bound])
            return
        source = self.flat if self._theta is None else self._theta
        for tensor, start, stop in self.copied:
            tensor.data.copy_(source[start:stop].view(tensor.shape))

    def clear_gradient(self) -> None:
        for tensor, _, _ in self.bound:
            tensor.grad = None

    def collect_gradient(self) -> Tensor:
        """The gradient of the mixed weights after backward, flat; frees the parameters' own. (P,)"""
        if self._grad is None:
            self._grad = torch.zeros_like(self.flat)
        parts: list[Tensor] = []
        grads: list[Tensor] = []
        written: set[int] = set()
        for tensor, start, stop in self.bound:
            part = self._grad[start:stop].view(ranks.local(tensor).shape)
            if tensor.grad is None:
                if start not in written:
                    part.zero_()
            elif start in written:  # a second name of a tied tensor
                _copy(parts, grads)
                parts, grads = [], []
                part.add_(ranks.local(tensor.grad))
            else:
                parts.append(part)
                grads.append(ranks.local(tensor.grad))
            written.add(start)
        _copy(parts, grads)
        self.clear_gradient()
        return self._grad


def _named(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Parameters and buffers, those that are not saved too, by the pool's names; one with two names twice."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return by_file_names(model, names, {**dict(model.named_parameters(remove_duplicate=False)), **buffers})


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except RuntimeError:  # a library's class of quantised weights, which has no memory of its own
        return False


def _torn(name: str, other: str, found: str) -> TaskError:
    return TaskError.of(
        f"model tensor {name}",
        expected=f"the same values as {other} in every checkpoint: the model ties the two",
        found=found,
        fix="untie them in the model",
    )
