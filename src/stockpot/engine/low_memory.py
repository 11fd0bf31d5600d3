"""Low-memory mode: gradients are projected and freed tensor by tensor during backward, activations are recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stockpot import ranks
from stockpot.engine.directions import Directions
from stockpot.engine.flat import TILE
from stockpot.engine.live import Live


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
        self._handles = [
            tensor.register_post_accumulate_grad_hook(self._hook(start, stop))  # type: ignore[no-untyped-call]
            for tensor, start, stop in live.bound
            if isinstance(tensor, nn.Parameter)
        ]

    def _hook(self, start: int, stop: int) -> Any:
        def project(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if stop > start:  # a rank may have no rows of it
                self._add(ranks.local(parameter.grad).reshape(-1), start, stop)
            parameter.grad = None

        return project

    def _add(self, gradient: Tensor, start: int, stop: int) -> None:
        directions, tiles = self.directions, self._tiles
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


@contextmanager
def gradients_freed(live: Live) -> Iterator[None]:
    """Each parameter's gradient is gone as soon as backward has made it."""

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [
        tensor.register_post_accumulate_grad_hook(free)  # type: ignore[no-untyped-call]
        for tensor, _, _ in live.bound
        if isinstance(tensor, nn.Parameter)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recomputing(model: nn.Module) -> Iterator[int]:
    """Checkpoint the activations of the model's repeated blocks; yields how many there are."""
    blocks = repeated_blocks(model)
    own = [vars(block).get("forward") for block in blocks]  # some libraries put one into the instance
    for block in blocks:
        block.forward = _checkpointed(block.forward)
    try:
        yield len(blocks)
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


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
