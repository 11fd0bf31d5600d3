"""Random changes to training batches, made on the device: a pure function of seed and step.

Which tensors of a batch are changed, and how, follows from their names, dimensions and types: images (n, C, H, W),
token ids (n, T), plain features (n, ...). Mixup averages a batch with a shuffled copy of itself.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional

from stockpot.errors import TaskError
from stockpot.task import Task
from stockpot.task.batches import LABEL_KEYS, batch_rows, find_labels, leaves, map_tensors
from stockpot.task.loss import check_pair
from stockpot.zoo.plan import Augmentation

TOKENS = "input_ids"
FIXED = (*LABEL_KEYS, "attention_mask", "pixel_mask", "bool_masked_pos")
DROPPED = 0.3  # share of the tokens that are dropped at strength 1
NOISE = 0.5  # share of a feature's standard deviation that is added as noise at strength 1


def augment(
    batch: Any, strength: float, options: Augmentation, *, seed: int, step: int
) -> tuple[Any, tuple[Tensor, float] | None]:
    """The changed batch, and for mixup each sample's partner (n,) with the share that is its own."""
    if strength == 0:
        return batch, None
    device = next(leaf.device for _, leaf in leaves(batch) if isinstance(leaf, Tensor))
    key = hashlib.sha256(f"augment/{seed}/{step}".encode()).digest()
    stream = Generator(device).manual_seed(int.from_bytes(key[:8], "little") >> 1)
    attention = batch.get("attention_mask") if isinstance(batch, Mapping) else None

    def change(leaf: Tensor, name: str | None) -> Tensor:
        if leaf.ndim == 4 and (leaf.is_floating_point() or leaf.dtype == torch.uint8):
            return _change_images(leaf, strength, options, stream)
        if leaf.dtype in (torch.int32, torch.int64) and leaf.ndim == 2 and name in (None, TOKENS):
            return _drop_tokens(leaf, strength, stream, attention)
        if leaf.is_floating_point() and leaf.ndim >= 2:
            return _add_noise(leaf, strength, stream)
        return leaf

    batch = _on_inputs(batch, change)
    if not options.mixup:
        return batch, None
    alpha = options.mixup * strength
    share = random.Random(f"mixup/{seed}/{step}").betavariate(alpha, alpha)
    partner = torch.randperm(batch_rows(batch), generator=stream, device=device)  # (n,)
    return _on_inputs(batch, lambda leaf, **_: _mix(leaf, partner, share)), (partner, share)


def _on_inputs(batch: Any, change: Callable[..., Tensor]) -> Any:
    """Apply `change` to every input tensor with its key, if it has one; labels and masks stay."""
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    inputs = batch[0] if pair else batch
    if isinstance(inputs, Mapping):
        changed: Any = {
            key: value if key in FIXED else map_tensors(partial(change, name=key), value)
            for key, value in inputs.items()
        }
    else:
        changed = map_tensors(partial(change, name=None), inputs)
    return (changed, batch[1]) if pair else changed


def _change_images(images: Tensor, strength: float, options: Augmentation, stream: Generator) -> Tensor:
    pixels = images.float() if images.dtype == torch.uint8 else images
    changes = {"jitter": _jitter, "shift": _shift, "flip": _flip, "erase": _erase}
    for change in (change for name, change in changes.items() if getattr(options, name)):
        pixels = change(pixels, strength, stream)
    return _to_type(pixels, images.dtype)


def _to_type(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """The type that the model takes; uint8 tells it that pixels still need scaling, so it has to stay."""
    return pixels.round().clamp(0, 255).to(dtype) if dtype == torch.uint8 else pixels.to(dtype)


def _uniform(like: Tensor, stream: Generator) -> Tensor:
    """In [0, 1), one for each image. (n, 1, 1, 1)"""
    return torch.rand(len(like), 1, 1, 1, generator=stream, device=like.device)


def _jitter(pixels: Tensor, strength: float, stream: Generator) -> Tensor:
    """Change brightness and contrast in units of each image's own spread, which fits pixels of any scale."""
    mean = pixels.mean(dim=(1, 2, 3), keepdim=True)  # (n, 1, 1, 1)
    spread = pixels.std(dim=(1, 2, 3), keepdim=True, unbiased=False)
    contrast, brightness = (0.5 * strength * (2 * _uniform(pixels, stream) - 1).to(pixels.dtype) for _ in range(2))
    return (pixels - mean) * (1 + contrast) + mean + brightness * spread


def _shift(pixels: Tensor, strength: float, stream: Generator) -> Tensor:
    """Move by up to an eighth of the side in each direction; what comes in is zero."""
    (n, channels, height, width), device = pixels.shape, pixels.device
    reach = max(1, round(strength * max(height, width) / 8))
    offsets = torch.randint(0, 2 * reach + 1, (2, n, 1, 1, 1), generator=stream, device=device)
    # The strength also says how many images move: for small ones a single pixel is the least step there is.
    down, right = torch.where(_uniform(pixels, stream) >= strength, reach, offsets)  # (n, 1, 1, 1) each
    image, channel = torch.arange(n, device=device).view(-1, 1, 1, 1), torch.arange(channels, device=device)
    row, column = torch.arange(height, device=device).view(-1, 1), torch.arange(width, device=device)
    padded = functional.pad(pixels, (reach,) * 4)
    return padded[image, channel.view(-1, 1, 1), down + row, right + column]


def _flip(pixels: Tensor, _: float, stream: Generator) -> Tensor:
    return torch.where(_uniform(pixels, stream) < 0.5, pixels.flip(-1), pixels)


def _erase(pixels: Tensor, strength: float, stream: Generator) -> Tensor:
    """In some images a rectangle, a quarter to half of each side, takes the image's mean."""
    inside = _uniform(pixels, stream) < 0.5 * strength
    for side, shape in zip(pixels.shape[2:], ((-1, 1), (-1,)), strict=True):
        length = side * (0.25 + 0.25 * _uniform(pixels, stream))
        start = _uniform(pixels, stream) * (side - length)
        place = torch.arange(side, device=pixels.device).view(shape) + 0.5
        inside = inside & (place >= start) & (place < start + length)
    return torch.where(inside, pixels.mean(dim=(2, 3), keepdim=True), pixels)


def _drop_tokens(ids: Tensor, strength: float, stream: Generator, attention: Tensor | None) -> Tensor:
    """Put a token from elsewhere in the batch where one is dropped.

    Padding stays, and so does the first position, where encoders keep the token they classify by.
    """
    dropped = torch.rand(ids.shape, generator=stream, device=ids.device) < DROPPED * strength
    dropped[:, 0] = False
    if attention is not None and attention.shape == ids.shape:
        dropped &= attention != 0
    elsewhere = torch.randint(0, len(ids), ids.shape, generator=stream, device=ids.device)
    return torch.where(dropped, ids.gather(0, elsewhere), ids)


def _add_noise(features: Tensor, strength: float, stream: Generator) -> Tensor:
    spread = features.std(dim=0, keepdim=True, unbiased=False)  # of each feature within the batch
    noise = torch.randn(features.shape, generator=stream, device=features.device, dtype=torch.float32)
    return features + (NOISE * strength * noise).to(features.dtype) * spread


def _mix(inputs: Tensor, partner: Tensor, share: float) -> Tensor:
    own = inputs.float() if inputs.dtype == torch.uint8 else inputs
    return _to_type(share * own + (1 - share) * own[partner], inputs.dtype)


def mixed_loss(task: Task, batch: Any, partner: Tensor, share: float, label_smoothing: float) -> Tensor:
    """Mean cross-entropy against both labels of each mixed sample.

    These are two losses on one set of logits, not one on soft labels: a model that computes its own loss would take
    float labels for another kind of problem.
    """
    logits = task.logits(batch)
    labels = check_pair(logits, find_labels(batch), "mixup")
    if logits.ndim != 2:
        raise TaskError.of("mixup", "one label per sample", f"logits {tuple(logits.shape)}", "leave mixup out")
    one = functional.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    other = functional.cross_entropy(logits, labels[partner], label_smoothing=label_smoothing)
    return share * one + (1 - share) * other


def check_mixup(batch: Any, own_loss: bool) -> None:
    """Mixing needs inputs that can be averaged, and the default loss, which can be taken twice."""
    found = ["a loss of your own"] if own_loss else []

    def look(leaf: Tensor, name: str | None) -> Tensor:
        if not (leaf.is_floating_point() or (leaf.dtype == torch.uint8 and leaf.ndim == 4)):
            where = f" {name}" if name else ""
            found.append(f"inputs{where} of type {str(leaf.dtype).removeprefix('torch.')}")
        return leaf

    _on_inputs(batch, look)
    if found:
        expected = "images or features with class labels and the default loss"
        raise TaskError.of("mixup", expected=expected, found=found[0], fix="leave mixup at 0")
