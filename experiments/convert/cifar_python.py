"""CIFAR-10 or CIFAR-100 of the original archives ("python version") to arrays that a recipe reads.

    python experiments/convert/cifar_python.py experiments/data/cifar-10-batches-py

writes train.npz and test.npz into the folder `arrays` in it: `x` (n, 3, 32, 32) uint8 and `y`, with CIFAR-100's
coarse classes in `coarse`. The batches are pickles. They are taken apart instruction by instruction and none of them is
carried out, so that nothing in such a file can run.
"""

from __future__ import annotations

import pickletools
import sys
from pathlib import Path
from typing import Any

import numpy as np

PARTS = {
    "train": ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
    "test": ("test_batch",),
}
KEYS = {b"labels": "y", b"fine_labels": "y", b"coarse_labels": "coarse"}
OTHERS = (b"data", b"batch_label", b"filenames")
_TEXT = {
    "SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES",
    "BYTEARRAY8",
}  # fmt: skip
_NUMBER = {"BININT", "BININT1", "BININT2"}


def convert(folder: Path) -> None:
    (folder / "arrays").mkdir(exist_ok=True)
    for part, names in PARTS.items():
        files = [folder / name for name in names if (folder / name).is_file()] or [folder / part]
        batches = [read_batch(file) for file in files]
        whole: dict[str, Any] = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
        np.savez(folder / "arrays" / f"{part}.npz", **whole)


def read_batch(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Pixels are the long text after the key `data`, labels the numbers after theirs."""
    labels: dict[str, list[int]] = {name: [] for name in KEYS.values()}
    pixels = key = b""
    try:
        for opcode, value, _ in pickletools.genops(file.read_bytes()):
            if opcode.name in _TEXT:
                text = str(value).encode("latin1") if isinstance(value, str) else bytes(value or b"")
                if key == b"data" and len(text) >= 3072:
                    pixels = text
                elif text in KEYS or text in OTHERS:
                    key = text
            elif opcode.name in _NUMBER and key in KEYS:
                labels[KEYS[key]].append(int(value or 0))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file}: expected a CIFAR python batch, found {error}") from error
    count = len(pixels) // 3072
    found = {name: np.array(numbers, np.int64) for name, numbers in labels.items() if numbers}
    if not count or len(pixels) % 3072 or "y" not in found or any(len(n) != count for n in found.values()):
        sizes = {name: len(numbers) for name, numbers in found.items()}
        raise SystemExit(f"{file}: expected 3,072 bytes and a label per image, found {len(pixels)} and {sizes}")
    return {"x": np.frombuffer(pixels, np.uint8).reshape(-1, 3, 32, 32), **found}


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
