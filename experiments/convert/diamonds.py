"""Diamonds and their prices: those of the best cut to learn from first, those of the other cuts to turn to."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from convert.parts import Array

MEMBER = "resources/rdata/csv/ggplot2/diamonds.csv"
NUMBERS = ("carat", "depth", "table", "x", "y", "z")
WORDS = {
    "cut": ("Fair", "Good", "Very Good", "Premium", "Ideal"),
    "color": ("D", "E", "F", "G", "H", "I", "J"),
    "clarity": ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"),
}
FIRST = "Ideal"  # 21,551 of 53,940; the other cuts are the new domain
HELD = 5000  # of the first
SIZES = {"test": 16000, "dev": 4000, "fit": 4000}  # of the others; the rest is `train`


def convert(read: Callable[[str], bytes], out: Path) -> None:
    """`out/tables/PART.npz`: `x` (n, 26) float32 and `y` (n,), the logarithm of the price.

    `ideal` is for pre-training and `held_ideal` for what is left of it later; `train`, `fit`, `dev` and `test` are of
    the other cuts.
    """
    folder = out / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(read("resources.tar.gz"))) as archive:
        file = archive.extractfile(MEMBER)
        assert file is not None
        rows = list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    first = [row for row in rows if row["cut"] == FIRST]
    others = [row for row in rows if row["cut"] != FIRST]
    parts = {"held_ideal": first[:HELD], "ideal": first[HELD:]}
    start = 0
    for part, size in SIZES.items():
        parts[part], start = others[start : start + size], start + size
    parts["train"] = others[start:]
    scale = _scale(_numbers(parts["ideal"]))
    for part, some in parts.items():
        x, y = _table(some, scale)
        np.savez(folder / f"{part}.npz", x=x, y=y)


def _numbers(rows: Sequence[dict[str, str]]) -> Array:
    """(n, 6); a size of zero, which some rows have, is not known."""
    found = np.array([[float(row[name]) for name in NUMBERS] for row in rows])
    return np.where(found == 0, np.nan, found)


def _scale(numbers: Array) -> tuple[Array, Array]:
    return np.nanmean(numbers, axis=0), np.nanstd(numbers, axis=0)


def _table(rows: Sequence[dict[str, str]], scale: tuple[Array, Array]) -> tuple[Array, Array]:
    """Numbers in units of their spread, clipped against typing errors (a width of 59 mm); words as 0 and 1."""
    mean, spread = scale
    numbers = np.nan_to_num((_numbers(rows) - mean) / spread).clip(-6, 6)
    words = [[float(row[name] == one) for name, known in WORDS.items() for one in known] for row in rows]
    price = np.log([float(row["price"]) for row in rows])
    return np.concatenate((numbers, np.array(words)), axis=1).astype(np.float32), price.astype(np.float32)
