"""Images (n, C, H, W), uint8 or floating point."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn import functional

from stockpot.finetune.plan import Augmentation


def change_images(images: Tensor, strength: float, options: Augmentation, stream: Generator) -> Tensor:
    pixels = images.float() if images.dtype == torch.uint8 else images
    if options.jitter:
        pixels = _jitter(pixels, strength, stream)
    if options.shift:
        pixels = _shift(pixels, strength, stream)
    if options.flip:
        turned = torch.rand(len(pixels), generator=stream, device=pixels.device) < 0.5
        pixels = torch.where(turned.view(-1, 1, 1, 1), pixels.flip(-1), pixels)
    if options.erase:
        pixels = _erase(pixels, strength, stream)
    return back(pixels, images.dtype)


def back(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """To the type the model takes; uint8 tells it that pixels still need scaling, so it has to stay."""
    return pixels.round().clamp(0, 255).to(dtype) if dtype == torch.uint8 else pixels.to(dtype)


def _jitter(pixels: Tensor, strength: float, stream: Generator) -> Tensor:
    n = len(pixels)
    # In units of each image's own spread, which fits pixels of any scale.
    mean = pixels.mean(dim=(1, 2, 3), keepdim=True)  # (n, 1, 1, 1)
    spread = pixels.std(dim=(1, 2, 3), keepdim=True, unbiased=False)
    contrast = 1 + 0.5 * strength * _signed(n, pixels, stream)
    brightness = 0.5 * strength * _signed(n, pixels, stream) * spread
    return (pixels - mean) * contrast + mean + brightness


def _shift(pixels: Tensor, strength: float, stream: Generator) -> Tensor:
    """Move by up to an eighth of the side in each direction; what comes in is zero."""
    n, channels, height, width = pixels.shape
    reach = max(1, round(strength * max(height, width) / 8))
    padded = functional.pad(pixels, (reach,) * 4)
    size = (2, n)
    offsets = torch.randint(0, 2 * reach + 1, size, generator=stream, device=pixels.device)
    # The strength also says how many images move: for small ones a single pixel is the least step there is.
    still = torch.rand(n, generator=stream, device=pixels.device) >= strength
    down, right = torch.where(still, reach, offsets)  # (n,) each
    rows = down.view(-1, 1) + torch.arange(height, device=pixels.device)  # (n, H)
    columns = right.view(-1, 1) + torch.arange(width, device=pixels.device)  # (n, W)
    padded = padded.gather(2, rows.view(n, 1, height, 1).expand(-1, channels, -1, padded.shape[3]))
    return padded.gather(3, columns.view(n, 1, 1, width).expand(-1, channels, height, -1))


def _erase(pixels: Tensor, strength: float, stream: Generator) -> Tensor:
    """In some images a rectangle, a quarter to half of each side, takes the image's mean."""
    n, _, height, width = pixels.shape
    chosen = torch.rand(n, generator=stream, device=pixels.device) < 0.5 * strength
    inside = chosen.view(-1, 1, 1, 1)
    for side, shape in ((height, (1, 1, -1, 1)), (width, (1, 1, 1, -1))):
        length = side * (0.25 + 0.25 * torch.rand(n, generator=stream, device=pixels.device))
        start = torch.rand(n, generator=stream, device=pixels.device) * (side - length)
        place = torch.arange(side, device=pixels.device).view(shape) + 0.5
        begin, end = (edge.view(-1, 1, 1, 1) for edge in (start, start + length))
        inside = inside & (place >= begin) & (place < end)
    return torch.where(inside, pixels.mean(dim=(2, 3), keepdim=True), pixels)


def _signed(n: int, like: Tensor, stream: Generator) -> Tensor:
    """Uniform in [-1, 1], one for each image. (n, 1, 1, 1)"""
    return (2 * torch.rand(n, 1, 1, 1, generator=stream, device=like.device) - 1).to(like.dtype)
