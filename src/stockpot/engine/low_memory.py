"""Low-memory mode: gradients are projected and freed tensor by tensor during backward, activations are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stockpot import ranks
from stockpot.engine.directions import TILE, Directions
from stockpot.engine.live import Live
from stockpot.engine.wide import replaced


class Projector:
    """Receives each parameter's gradient as backward makes it; no two of them are ever held together."""

    def __init__(self, live: Live, directions: Directions) -> None:
        self.live = live
        self.directions = directions
        b, G = directions.rows.shape[0], live.plan.groups
        self._tiles = live.tiles if directions.fast else None
        # (tiles, b) for the kernels, (b, G) for plain PyTorch
        shape = (b, G) if self._tiles is None else (self._tiles.count, b)
        self._partial = torch.zeros(shape, dtype=live.dtype, device=live.device)
        self._group = {slot.start: slot.group for slot in live.plan.slots}
        self._tile_of = {} if live.tiles is None else {s: i for i, s in enumerate(live.tiles.start.tolist())}
        self._handles = _as_they_come(live, self._add)

    def _add(self, gradient: Tensor, start: int, stop: int) -> None:
        directions, tiles = self.directions, self._tiles
        gradient = ranks.local(gradient).reshape(-1)
        if tiles is not None:
            from stockpot.engine import kernels

            count = -(-(stop - start) // TILE)
            kernels.project_part(
                directions.rows, gradient, tiles, directions.tile_scale, self._partial,
                first=self._tile_of[start], count=count, offset=start, end=stop, add=True,
            )  # fmt: skip
        else:
            rows = directions.part(start, stop, self._partial.dtype)
            self._partial[:, self._group[start]] += rows @ gradient.to(self._partial.dtype)

    def begin(self) -> None:
        self._partial.zero_()

    def finish(self) -> Tensor:
        """(b, G), for all backward passes since `begin`."""
        if self._tiles is None:
            return self._partial.clone()
        from stockpot.engine import kernels

        return kernels.add_parts(self._partial, self._tiles)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _as_they_come(live: Live, use: Callable[[Tensor, int, int], None]) -> list[Any]:
    """Give each parameter's gradient and its place to `use` as soon as backward has made it, and free it."""

    def hook(start: int, stop: int) -> Callable[[Tensor], None]:
        def taken(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if stop > start:  # a rank may have no rows of it
                use(parameter.grad, start, stop)
            parameter.grad = None

        return taken

    return [
        tensor.register_post_accumulate_grad_hook(hook(start, stop))  # type: ignore[no-untyped-call]
        for tensor, start, stop in live.bound
        if isinstance(tensor, nn.Parameter)
    ]


@contextmanager
def gradients_freed(live: Live) -> Iterator[None]:
    """Each parameter's gradient is gone as soon as backward has made it."""
    handles = _as_they_come(live, lambda *_: None)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Checkpoint the activations of the model's repeated blocks."""
    with replaced([(block, _checkpointed(block.forward)) for block in repeated_blocks(model)]):
        yield


def _checkpointed(forward: Any) -> Any:
    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The siblings of one class that hold the most parameters: a transformer's layers, a network's stages."""
    best: list[nn.Module] = []
    most = 0
    for parent in model.modules():
        kinds: dict[type, list[nn.Module]] = {}
        for child in parent.children():
            kinds.setdefault(type(child), []).append(child)
        for siblings in kinds.values():
            size = sum(p.numel() for s in siblings for p in s.parameters())
            if len(siblings) >= 2 and size > most:
                best, most = siblings, size
    return best
