"""A vision transformer small enough to train on a laptop's processor in seconds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 64
DEPTH = 4
HEADS = 4
PATCH = 2


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = (  # (n, heads, tokens, width / heads) each
            part.view(n, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).reshape(n, tokens, width))
        changed: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return changed


class DigitViT(nn.Module):
    """Grey images (n, 1, 8, 8), uint8 or in [0, 1], to class logits (n, classes)."""

    def __init__(self, classes: int = 10, size: int = 8, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=PATCH, stride=PATCH)
        # Large: outputs are averaged over patches, which would make it a bag of patches for many epochs.
        self.position = nn.Parameter(0.5 * torch.randn(1, (size // PATCH) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, HEADS) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def tokens(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """One vector per patch, (n, tokens, width); patches marked in `hidden` (n, tokens) are blanked."""
        pixels = images.to(self.position.dtype)
        if images.dtype == torch.uint8:
            pixels = pixels / 255
        x = self.patches(2 * pixels - 1).flatten(2).transpose(1, 2)  # (n, tokens, width)
        if hidden is not None:
            x = x.masked_fill(hidden.unsqueeze(-1), 0.0)
        seen: Tensor = self.norm(self.blocks(x + self.position))
        return seen

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.tokens(images).mean(dim=1))
        return logits
