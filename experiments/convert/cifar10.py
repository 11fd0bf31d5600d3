"""CIFAR-10 from PNGs of 10,000 rows, each row an image of 32 x 32 pixels, and labels in JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from convert.parts import Array, divide

SIZES = {"fit": 5000, "dev": 5000, "held": 10000}
SIDE = 32
TRAIN = tuple(f"data_batch_{number}.png" for number in range(1, 6))


def convert(read: Callable[[str], bytes], out: Path) -> None:
    """`out/images/{train,fit,dev,test}.npz` with `x` (n, 32, 32, 3) uint8 and `y`."""
    folder = out / "images"
    folder.mkdir(parents=True, exist_ok=True)
    images = np.concatenate([decode(read(name)) for name in TRAIN])
    labels = _labels(read("train_lables.json"), len(images))
    parts = divide(labels, SIZES, "train")
    held = parts.pop("held")
    for part, rows in parts.items():
        np.savez(folder / f"{part}.npz", x=images[rows], y=labels[rows])
    test = decode(read("test_batch.png"))
    own = _labels(read("test_lables.json"), len(test))
    np.savez(folder / "test.npz", x=np.concatenate((test, images[held])), y=np.concatenate((own, labels[held])))


def decode(png: bytes) -> Array:
    from PIL import Image

    with Image.open(io.BytesIO(png)) as picture:
        pixels = np.asarray(picture.convert("RGB"))  # (n, 1024, 3)
    return pixels.reshape(-1, SIDE, SIDE, 3)


def _labels(text: bytes, count: int) -> Array:
    labels = np.array(json.loads(text), dtype=np.int64)
    if labels.shape != (count,) or labels.min() < 0 or labels.max() > 9:
        raise ValueError(f"expected {count} labels from 0 to 9, found shape {labels.shape}")
    return labels
