"""One door to all model libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from stockpot.adapters.code import call_code
from stockpot.adapters.inputs import LoadedModel
from stockpot.adapters.models import clip, open_clip, timm, torchvision, transformers
from stockpot.adapters.models.weights import load_weights
from stockpot.errors import TaskError, describe

_NAMED = {"timm": timm.load, "torchvision": torchvision.load, "open_clip": open_clip.load, "clip": clip.load}


def load_model(
    kind: str,
    source: Any,
    *,
    folder: Path,
    classes: int | None = None,
    options: dict[str, Any] | None = None,
    weights: Path | None = None,
    pretrained: bool = False,
    auto_class: str | None = None,
    tokenizer: Path | None = None,
    seed: int = 0,
) -> LoadedModel:
    """The model on the CPU in single precision. Weights it starts with are random, by `seed`, unless `pretrained`."""
    options = dict(options or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "transformers":
            loaded = transformers.load(
                source if isinstance(source, dict) else folder / Path(source).expanduser(),
                auto_class=auto_class,
                tokenizer=tokenizer,
                classes=classes,
                options=options,
                pretrained=pretrained,
            )
        elif kind == "python":
            if classes is not None:
                options.setdefault("classes", classes)
            loaded = LoadedModel(_module(call_code(source, folder, **options), source))
        else:
            loaded = _NAMED[kind](source, classes, options)
    if pretrained and weights is not None:
        load_weights(loaded.model, weights)
    return loaded


def _module(found: Any, reference: str) -> nn.Module:
    if isinstance(found, nn.Module):
        return found
    raise TaskError(
        describe(
            f"python: {reference}",
            expected="a function that returns an nn.Module",
            found=f"one that returned {type(found).__name__}",
            fix="return the model itself",
        )
    )
