"""One door to all model libraries, and starting weights from a local checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from stockpot.adapters import transformers, vision
from stockpot.adapters.code import call_code
from stockpot.adapters.extras import bad_model
from stockpot.adapters.inputs import LoadedModel
from stockpot.pool import open_checkpoint

_BY_NAME = {
    "timm": vision.load_timm,
    "torchvision": vision.load_torchvision,
    "open_clip": vision.load_open_clip,
}


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
            model = call_code(source, folder, **options)
            if not isinstance(model, nn.Module):
                returned = f"one that returned {type(model).__name__}"
                expected = "a function that returns an nn.Module"
                raise bad_model(f"python: {source}", expected, returned, "return the model itself")
            loaded = LoadedModel(model)
        else:
            loaded = _BY_NAME[kind](source, classes, options)
    if pretrained and weights is not None:
        load_weights(loaded.model, weights)
    return loaded


def load_weights(model: nn.Module, path: Path) -> tuple[str, ...]:
    """Copy what fits, read as safely as a pool is; the names that stay as they were come back.

    Only one layer may stay: a head of another size. Anything more is the wrong file.
    """
    checkpoint = open_checkpoint(path)
    own = dict(model.state_dict())
    # A bare encoder's names lack the prefix of the module it is used in here.
    prefixes = ("", *sorted({f"{name.partition('.')[0]}." for name in own}))
    prefix = max(prefixes, key=lambda p: sum(f"{p}{name}" in own for name in checkpoint.specs))
    given = {f"{prefix}{name}": name for name in checkpoint.specs}
    fits = {n for n in own if n in given and tuple(checkpoint.specs[given[n]].shape) == tuple(own[n].shape)}
    left = tuple(name for name in own if name not in fits)
    if not fits or len({name.rpartition(".")[0] for name in left}) > 1:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise bad_model(
            f"weights {path}",
            "tensors for all of the model except a new head",
            f"none that fit {shown}",
            "give the checkpoint this architecture was pre-trained as",
        )
    with torch.no_grad():
        for name in sorted(fits):
            own[name].copy_(checkpoint.tensor(given[name]))
    return left
