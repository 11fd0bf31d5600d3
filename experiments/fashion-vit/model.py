"""A small vision transformer for grey images of 28 x 28: 49 patches of 4 x 4, 2.7M parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE, PATCH = 28, 4
PIXELS = PATCH * PATCH
TOKENS = (SIDE // PATCH) ** 2


def build(
    classes: int = 10, width: int = 192, depth: int = 6, heads: int = 6, patch: int = PATCH, position: float = 0.02
) -> VisionTransformer:
    """The model a recipe names; experiments/tiny asks for a smaller one."""
    return VisionTransformer(classes, width, depth, heads, patch, position)


def patches(images: Tensor, patch: int = PATCH) -> Tensor:
    """(n, 1, 28, 28) -> (n, 49, 16), row by row. (`unfold` does it too, with a kernel for every image.)"""
    n, side = len(images), images.shape[-1] // patch
    rows = images.reshape(n, side, patch, side, patch)
    return rows.transpose(2, 3).reshape(n, side * side, patch * patch)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (n, t, width)
        x = x + self._attend(self.norm1(x))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))

    def _attend(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        # (3, n, heads, t, width / heads)
        query, key, value = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(n, t, width))


class VisionTransformer(nn.Module):
    """Patches, learned positions, blocks; the head reads the mean of all tokens."""

    def __init__(
        self, classes: int, width: int, depth: int, heads: int, patch: int = PATCH, position: float = 0.02
    ) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, width)
        self.position = nn.Parameter(position * torch.randn((SIDE // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:  # (n, 1, 28, 28), normalised -> (n, classes)
        return self.head(self.encode(patches(images, self.patch)).mean(dim=1))

    def encode(self, pixels: Tensor, kept: Tensor | None = None) -> Tensor:
        """(n, 49, 16) -> (n, t, width): of all tokens, or of those whose numbers are in `kept` (n, t)."""
        x = self.embed(pixels) + self.position
        if kept is not None:
            x = x.gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)
