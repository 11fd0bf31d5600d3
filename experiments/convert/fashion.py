"""Fashion-MNIST from idx files: the training images are divided, and some of them are tested on."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np

from convert.parts import Array, divide

SIZES = {"fit": 6000, "dev": 4000, "held": 15000}
# Held for the test as well, out of what SIZES leave: images that the zoo's earlier pools were fine-tuned on, and no
# later one is. What no pool was fine-tuned on served to choose the default (docs/search.md), so it belongs to `train`.
MORE = {"held": 15000}
TINY = {"train": 8000, "fit": 3000, "other": 8000}  # of experiments/tiny


def convert(read: Callable[[str], bytes], out: Path) -> None:
    """`out/images/{train,fit,dev,held,test}.npz`: `x` (n, 28, 28) uint8 and `y`; `held` is also the end of `test`."""
    folder = out / "images"
    folder.mkdir(parents=True, exist_ok=True)
    x, y = _samples(read, "train")
    parts = divided(y)
    for part, rows in parts.items():
        np.savez(folder / f"{part}.npz", x=x[rows], y=y[rows])
    images, labels = _samples(read, "t10k")
    held = parts["held"]
    np.savez(folder / "test.npz", x=np.concatenate((images, x[held])), y=np.concatenate((labels, y[held])))


def convert_tiny(read: Callable[[str], bytes], out: Path) -> None:
    """`out/images/{train,other,fit,judge}.npz`: what fashion-vit is not tested on; `other` is for a second pool."""
    folder = out / "images"
    folder.mkdir(parents=True, exist_ok=True)
    x, y = _samples(read, "train")
    for part, rows in divided_tiny(y).items():
        np.savez(folder / f"{part}.npz", x=x[rows], y=y[rows])


def divided(labels: Array) -> dict[str, Array]:
    """Row numbers of `fit`, `dev`, `held` and `train` among the 60,000 training images."""
    parts = divide(labels, SIZES, "train")
    rest = parts["train"]
    more = divide(labels[rest], MORE, "train")
    return {**parts, "held": np.concatenate((parts["held"], rest[more["held"]])), "train": rest[more["train"]]}


def divided_tiny(labels: Array) -> dict[str, Array]:
    """Row numbers of `train`, `fit`, `other` and `judge`, none of which is in `held`."""
    rows = np.sort(np.concatenate([rows for part, rows in divided(labels).items() if part != "held"]))
    return {part: rows[places] for part, places in divide(labels[rows], TINY, "judge").items()}


def _samples(read: Callable[[str], bytes], which: str) -> tuple[Array, Array]:
    images = _parse(read(f"{which}-images-idx3-ubyte.gz"), 3)
    return images, _parse(read(f"{which}-labels-idx1-ubyte.gz"), 1).astype(np.int64)


def _parse(content: bytes, rank: int) -> Array:
    """Two zero bytes, type 8 (uint8), the rank, the shape as big-endian numbers, the values."""
    raw = gzip.decompress(content)
    if raw[:4] != bytes((0, 0, 8, rank)):
        raise ValueError(f"expected an idx file of uint8 with {rank} dimensions, found bytes {raw[:4].hex(' ')}")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=rank, offset=4))
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)
