"""Which tensors of a batch are changed, and how: by their names, dimensions and types."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from stockpot.errors import TaskError, describe
from stockpot.finetune.augment.features import add_noise
from stockpot.finetune.augment.images import change_images
from stockpot.finetune.augment.mixup import draw_share, mix_inputs, shuffle
from stockpot.finetune.augment.tokens import drop_tokens
from stockpot.finetune.plan import Augmentation
from stockpot.task.batches import LABEL_KEYS, map_tensors

TOKENS = "input_ids"
FIXED = (*LABEL_KEYS, "attention_mask", "pixel_mask", "bool_masked_pos")


def augment(
    batch: Any, strength: float, options: Augmentation, *, seed: int, step: int
) -> tuple[Any, tuple[Tensor, float] | None]:
    """The changed batch, and for mixup each sample's partner (n,) with the share that is its own."""
    if strength == 0:
        return batch, None
    stream = _stream(_device(batch), seed, step)
    attention = batch.get("attention_mask") if isinstance(batch, Mapping) else None

    def change(leaf: Tensor, name: str | None) -> Tensor:
        if leaf.ndim == 4 and (leaf.is_floating_point() or leaf.dtype == torch.uint8):
            return change_images(leaf, strength, options, stream)
        if _is_tokens(leaf, name):
            return drop_tokens(leaf, strength, options.mask_id, stream, attention)
        if leaf.is_floating_point() and leaf.ndim >= 2:
            return add_noise(leaf, strength, stream)
        return leaf

    batch = _on_inputs(batch, change)
    if not options.mixup:
        return batch, None
    share = draw_share(options.mixup * strength, seed, step)
    partner = shuffle(_rows(batch), stream, stream.device)
    return _on_inputs(batch, lambda leaf, _: mix_inputs(leaf, partner, share)), (partner, share)


def check_mixup(batch: Any, own_loss: bool) -> None:
    """Mixing needs inputs that can be averaged, and the default loss, which can be taken twice."""
    found = "a loss of your own" if own_loss else None

    def look(leaf: Tensor, name: str | None) -> Tensor:
        nonlocal found
        if not (leaf.is_floating_point() or (leaf.dtype == torch.uint8 and leaf.ndim == 4)):
            where = f" {name}" if name else ""
            found = found or f"inputs{where} of type {str(leaf.dtype).removeprefix('torch.')}"
        return leaf

    _on_inputs(batch, look)
    if found is not None:
        raise TaskError(
            describe(
                "mixup",
                expected="images or features with class labels and the default loss",
                found=found,
                fix="leave mixup at 0",
            )
        )


def _is_tokens(leaf: Tensor, name: str | None) -> bool:
    whole = leaf.dtype in (torch.int32, torch.int64)
    return whole and leaf.ndim == 2 and (name is None or name == TOKENS)


def _on_inputs(batch: Any, change: Callable[[Tensor, str | None], Tensor]) -> Any:
    if isinstance(batch, Mapping):
        return {
            key: value if key in FIXED else map_tensors(lambda leaf, key=key: change(leaf, key), value)  # type: ignore[misc]
            for key, value in batch.items()
        }
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs = batch[0]
        if isinstance(inputs, Mapping):
            return (_on_inputs(inputs, change), batch[1])
        return (map_tensors(lambda leaf: change(leaf, None), inputs), batch[1])
    return map_tensors(lambda leaf: change(leaf, None), batch)


def _device(batch: Any) -> torch.device:
    return _first(batch).device


def _rows(batch: Any) -> int:
    return _first(batch).shape[0]


def _first(batch: Any) -> Tensor:
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found[0]


def _stream(device: torch.device, seed: int, step: int) -> Generator:
    key = hashlib.sha256(f"augment/{seed}/{step}".encode()).digest()
    return Generator(device).manual_seed(int.from_bytes(key[:8], "little") >> 1)
