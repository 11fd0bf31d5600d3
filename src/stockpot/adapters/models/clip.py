"""OpenAI CLIP's image transformer with a linear head, built in.

Tensor names are those of the published model-soups checkpoints: the encoder under `model.` (`model.visual.*`,
and what is left of the text side once its transformer is removed), the head under `classification_head.`.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stockpot.adapters.inputs import ImageInput, LoadedModel
from stockpot.errors import TaskError, describe

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

# name: image size, patch, width, layers, output width, width of the text side
SIZES = {
    "ViT-B-32": (224, 32, 768, 12, 512, 512),
    "ViT-B-16": (224, 16, 768, 12, 512, 512),
    "ViT-L-14": (224, 14, 1024, 24, 768, 768),
    "ViT-L-14-336": (336, 14, 1024, 24, 768, 768),
}
_HEAD_WIDTH = 64
_CONTEXT, _VOCABULARY = 77, 49408


def load(name: str, classes: int | None, options: dict[str, Any]) -> LoadedModel:
    key = name.replace("/", "-").replace("@", "-").removesuffix("px")
    if key not in SIZES:
        close = difflib.get_close_matches(key, SIZES, n=1)
        raise TaskError(
            describe(
                f"model.clip {name!r}",
                expected=f"one of {', '.join(SIZES)}",
                found="an unknown name",
                fix=f"use {close[0]}" if close else "use model.open_clip for other encoders",
            )
        )
    head = need_classes(classes, "model.clip")
    known = {"normalise", "text", "size", "patch", "width", "layers", "output", "text_width"}
    if unknown := set(options) - known:
        raise TaskError(
            describe(
                "model.options",
                expected=f"{', '.join(sorted(known))}",
                found=", ".join(sorted(unknown)),
                fix="remove what is unknown",
            )
        )
    names = ("size", "patch", "width", "layers", "output", "text_width")
    sizes = {n: int(options.get(n, default)) for n, default in zip(names, SIZES[key], strict=True)}
    encoder = Encoder(text=bool(options.get("text", True)), **sizes)
    model = Classifier(encoder, sizes["output"], head, normalise=bool(options.get("normalise", True)))
    size = sizes["size"]
    image = ImageInput((size, size), resize=size, mean=MEAN, std=STD, interpolation="bicubic", channels=3)
    return LoadedModel(model, image=image)


def need_classes(classes: int | None, where: str) -> int:
    if classes is None:
        raise TaskError(
            describe(
                where,
                expected="model.classes, the size of the linear head",
                found="none",
                fix="add classes: 1000, or however many the checkpoints have",
            )
        )
    return classes


class Classifier(nn.Module):
    """An image encoder and a linear head on its features, which are scaled to length one as CLIP does."""

    def __init__(self, encoder: nn.Module, width: int, classes: int, normalise: bool = True) -> None:
        super().__init__()
        self.model = encoder
        self.classification_head = nn.Linear(width, classes)
        self.normalise = normalise
        nn.init.zeros_(self.classification_head.bias)

    def forward(self, images: Tensor) -> Tensor:
        features = self.model.encode_image(images)  # type: ignore[operator]  # (n, width)
        if self.normalise:
            features = functional.normalize(features, dim=-1)
        logits: Tensor = self.classification_head(features)  # (n, classes)
        return logits


class Encoder(nn.Module):
    """CLIP without its text transformer; the other text tensors stay because the checkpoints have them."""

    def __init__(
        self, size: int, patch: int, width: int, layers: int, output: int, text_width: int, text: bool = True
    ) -> None:
        super().__init__()
        self.visual = Vision(size, patch, width, layers, output)
        if text:
            self.positional_embedding = nn.Parameter(torch.randn(_CONTEXT, text_width) * 0.01)
            self.text_projection = nn.Parameter(torch.randn(text_width, output) * text_width**-0.5)
            self.logit_scale = nn.Parameter(torch.tensor(2.6592))  # log(1 / 0.07)
            self.token_embedding = nn.Embedding(_VOCABULARY, text_width)
            self.ln_final = nn.LayerNorm(text_width)

    def encode_image(self, images: Tensor) -> Tensor:
        features: Tensor = self.visual(images)
        return features


class Vision(nn.Module):
    """Patches and a class token through pre-norm transformer blocks; the class token is projected."""

    def __init__(self, size: int, patch: int, width: int, layers: int, output: int) -> None:
        super().__init__()
        scale = width**-0.5
        self.conv1 = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.class_embedding = nn.Parameter(scale * torch.randn(width))
        self.positional_embedding = nn.Parameter(scale * torch.randn((size // patch) ** 2 + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        blocks = [Block(width) for _ in range(layers)]
        self.transformer = nn.ModuleDict({"resblocks": nn.Sequential(*blocks)})
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(scale * torch.randn(width, output))

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
        self.attn = nn.MultiheadAttention(width, max(1, width // _HEAD_WIDTH), batch_first=True)
        self.ln_1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(width, 4 * width), gelu=QuickGELU(), c_proj=nn.Linear(4 * width, width)
            )
        )
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
