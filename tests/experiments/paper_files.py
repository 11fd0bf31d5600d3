"""Tiny files of exactly the formats that the recipes of the paper's own runs read."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scripts import script
from torch import Tensor

from stand_in_open_clip import TINY

CLASSES = ("n01440764", "n01443537", "n01484850")
_VISION = TINY["vision_cfg"]


def published_names(layers: int) -> list[str]:
    """Tensors of `model_0.pt` ... in their order: CLIP under `model.` without its text transformer, and the head."""
    block = ["attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight", "attn.out_proj.bias"]
    block += ["ln_1.weight", "ln_1.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight"]
    block += ["mlp.c_proj.bias", "ln_2.weight", "ln_2.bias"]
    visual = ["class_embedding", "positional_embedding", "proj", "conv1.weight", "ln_pre.weight", "ln_pre.bias"]
    visual += [f"transformer.resblocks.{n}.{name}" for n in range(layers) for name in block]
    visual += ["ln_post.weight", "ln_post.bias"]
    encoder = ["positional_embedding", "text_projection", "logit_scale"]
    encoder += [f"visual.{name}" for name in visual]
    encoder += ["token_embedding.weight", "ln_final.weight", "ln_final.bias"]
    return [f"model.{name}" for name in encoder] + ["classification_head.weight", "classification_head.bias"]


def shapes(classes: int) -> dict[str, tuple[int, ...]]:
    """Of the tiny tower, by what the names mean; the vocabulary and context are CLIP's own."""
    width, output, text = _VISION["width"], TINY["embed_dim"], TINY["text_cfg"]["width"]
    tokens = (_VISION["image_size"] // _VISION["patch_size"]) ** 2 + 1
    ends = {
        "model.positional_embedding": (77, text),
        "model.text_projection": (text, output),
        "model.logit_scale": (),
        "model.token_embedding.weight": (49408, text),
        "model.visual.class_embedding": (width,),
        "model.visual.positional_embedding": (tokens, width),
        "model.visual.proj": (width, output),
        "model.visual.conv1.weight": (width, 3, _VISION["patch_size"], _VISION["patch_size"]),
        "classification_head.weight": (classes, output),
        "classification_head.bias": (classes,),
        "in_proj_weight": (3 * width, width),
        "in_proj_bias": (3 * width,),
        "out_proj.weight": (width, width),
        "out_proj.bias": (width,),
        "c_fc.weight": (4 * width, width),
        "c_fc.bias": (4 * width,),
        "c_proj.weight": (width, 4 * width),
        "c_proj.bias": (width,),
    }
    found: dict[str, tuple[int, ...]] = {}
    for name in published_names(_VISION["layers"]):
        norm = (text,) if "ln_final" in name else (width,)
        found[name] = next((shape for end, shape in ends.items() if name.endswith(end)), norm)
        if name in ends:
            found[name] = ends[name]
    return found


def published_soups(folder: Path, count: int, classes: int = 3) -> None:
    """Fine-tunes of one tower. As published: plain state dicts in single precision, saved from a GPU, the text side
    untouched by training, and two of them (4 and 5) the same run twice."""
    folder.mkdir(parents=True)
    base = {name: _start(name, shape) for name, shape in shapes(classes).items()}
    for k in range(count):
        generator = torch.Generator().manual_seed(4 if k == 5 else k)
        state = OrderedDict(
            (n, t + 0.02 * torch.randn(t.shape, generator=generator) if "visual" in n or "head" in n else t)
            for n, t in base.items()
        )
        save_as_from_gpu(state, folder / f"model_{k}.pt")


def save_as_from_gpu(state: dict[str, Tensor], file: Path) -> None:
    """torch.save writes where each tensor lay; a reader must not need that device."""
    tag = torch.serialization.location_tag
    torch.serialization.location_tag = lambda _: "cuda:0"  # type: ignore[assignment]
    try:
        torch.save(state, file)
    finally:
        torch.serialization.location_tag = tag


def clip_weights(file: Path) -> dict[str, Tensor]:
    """CLIP's own state dict: both towers, half precision except for norms and embeddings."""
    file.parent.mkdir(parents=True)
    state: dict[str, Tensor] = {}
    for name, shape in shapes(1).items():
        if name.startswith("model."):
            exact = "ln_" in name or "embedding" in name or name.endswith("logit_scale")
            state[name.removeprefix("model.")] = _start(name, shape) if exact else _start(name, shape).half()
    text = TINY["text_cfg"]["width"]
    state["transformer.resblocks.0.attn.in_proj_weight"] = torch.zeros(3 * text, text).half()
    state["transformer.resblocks.0.ln_1.weight"] = torch.ones(text)
    torch.save(state, file)
    return state


def _start(name: str, shape: tuple[int, ...]) -> Tensor:
    if "ln_" in name:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    scale = (shape[-1] if len(shape) == 2 else shape[0] if shape else 1) ** -0.5
    made: Tensor = scale * torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    return made


def imagenet(folder: Path, train: int = 8, val: int = 4, held: int = 3) -> list[str]:
    """JPEG files in class folders and the published mask over train/; the held-out files' names come back."""
    draw = np.random.RandomState(0)
    files: list[str] = []
    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(CLASSES):
            place = folder / part / name
            place.mkdir(parents=True)
            for n in range(count):
                file = place / f"{name}_{100 + 7 * n}.JPEG"
                _photo(draw, label, n).save(file, "JPEG")
                if part == "train":
                    files.append(f"{name}/{file.name}")
    files.sort()
    mask = np.zeros(len(files))
    for label in range(len(CLASSES)):
        mask[label * train + draw.permutation(train)[:held]] = 1
    np.save(folder / "imagenet_98_idxs.npy", mask)
    return [file for file, chosen in zip(files, mask, strict=True) if chosen]


def _photo(draw: np.random.RandomState, label: int, n: int) -> Image.Image:
    """No two of one size; some grey, some for printing, as in the real set."""
    height, width = 40 + 3 * n, 52 - 2 * n
    pixels = draw.randint(0, 120, (height, width, 3)) + 60 * np.eye(3, dtype=int)[label]
    image = Image.fromarray(pixels.astype(np.uint8))
    return image.convert({5: "L", 6: "CMYK"}.get(n, "RGB"))


def cifar(folder: Path, classes: int, train: int = 60, test: int = 20) -> None:
    """Python batches, converted: pickled dicts with bytes as keys, one row of 3,072 bytes per image."""
    folder.mkdir(parents=True)
    ten = classes == 10
    parts = {f"data_batch_{n}": train // 5 for n in range(1, 6)} | {"test_batch": test}
    for seed, (name, count) in enumerate((parts if ten else {"train": train, "test": test}).items()):
        draw = np.random.RandomState(seed)
        labels = [int(label) for label in (np.arange(count) % classes)]
        content: dict[bytes, Any] = {b"data": draw.randint(0, 256, (count, 3072)).astype(np.uint8)}
        content |= {b"batch_label": name.encode(), b"filenames": [b"image.png"] * count}
        if ten:
            content[b"labels"] = labels
        else:
            content |= {b"fine_labels": labels, b"coarse_labels": [label // 5 for label in labels]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    script("convert.cifar_python").convert(folder)
