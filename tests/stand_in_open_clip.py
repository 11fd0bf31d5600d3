"""A stand-in for open_clip, which has no build for machines without torchvision.

It has the tensor names and the arithmetic of OpenAI's CLIP, as open_clip's `-quickgelu` models do;
tests/adapters/test_adapters_vision_gpu.py holds the real library against it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    f"{name}-quickgelu": {
        "embed_dim": width_of_text,
        "vision_cfg": {"image_size": 224, "layers": layers, "width": width, "patch_size": patch},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": width_of_text, "layers": 12},
    }
    for name, layers, width, patch, width_of_text in (("ViT-B-32", 12, 768, 32, 512), ("ViT-L-14", 24, 1024, 14, 768))
}
# Options of a recipe that make the same tower tiny.
TINY: dict[str, Any] = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("open_clip")
    module.list_models = lambda: list(CONFIGURATIONS)
    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "open_clip", module)


def create_model(name: str, pretrained: None, precision: str, pretrained_hf: bool, **options: Any) -> nn.Module:
    assert (pretrained, precision, pretrained_hf) == (None, "fp32", False)  # nothing may be downloaded
    return Clip(**{**CONFIGURATIONS[name.replace("/", "-")], **options})


class Clip(nn.Module):
    def __init__(self, embed_dim: int, vision_cfg: dict[str, Any], text_cfg: dict[str, Any]) -> None:
        super().__init__()
        width = text_cfg["width"]
        self.visual = Vision(**vision_cfg, output_dim=embed_dim)
        self.transformer = nn.ModuleDict(
            {"resblocks": nn.Sequential(*(Block(width) for _ in range(text_cfg["layers"])))}
        )
        self.positional_embedding = nn.Parameter(torch.randn(text_cfg["context_length"], width) * 0.01)
        self.text_projection = nn.Parameter(torch.randn(width, embed_dim) * width**-0.5)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))  # log(1 / 0.07)
        self.token_embedding = nn.Embedding(text_cfg["vocab_size"], width)
        self.ln_final = nn.LayerNorm(width)

    def encode_image(self, images: Tensor) -> Tensor:
        features: Tensor = self.visual(images)
        return features


class Vision(nn.Module):
    """Patches and a class token through pre-norm transformer blocks; the class token is projected."""

    def __init__(self, image_size: int, patch_size: int, width: int, layers: int, output_dim: int) -> None:
        super().__init__()
        scale = width**-0.5
        self.image_size, self.output_dim = (image_size, image_size), output_dim
        self.conv1 = nn.Conv2d(3, width, patch_size, stride=patch_size, bias=False)
        self.class_embedding = nn.Parameter(scale * torch.randn(width))
        tokens = (image_size // patch_size) ** 2 + 1
        self.positional_embedding = nn.Parameter(scale * torch.randn(tokens, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = nn.ModuleDict({"resblocks": nn.Sequential(*(Block(width) for _ in range(layers)))})
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(scale * torch.randn(width, output_dim))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv1(images).flatten(2).transpose(1, 2)  # (n, patches, width)
        token = self.class_embedding.expand(len(patches), 1, -1).to(patches.dtype)
        tokens = torch.cat([token, patches], dim=1) + self.positional_embedding.to(patches.dtype)
        tokens = self.transformer["resblocks"](self.ln_pre(tokens))
        features: Tensor = self.ln_post(tokens[:, 0]) @ self.proj  # (n, output)
        return features


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, max(1, width // 64), batch_first=True)
        self.ln_1 = nn.LayerNorm(width)
        layers = {"c_fc": nn.Linear(width, 4 * width), "gelu": QuickGELU(), "c_proj": nn.Linear(4 * width, width)}
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.ln_2 = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = self.ln_1(tokens)
        tokens = tokens + self.attn(seen, seen, seen, need_weights=False)[0]
        changed: Tensor = tokens + self.mlp(self.ln_2(tokens))
        return changed


class QuickGELU(nn.Module):
    """The approximation CLIP was trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)
