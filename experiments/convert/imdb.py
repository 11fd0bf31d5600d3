"""IMDB reviews: one list of texts sorted by label, with duplicates, becomes four tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from convert.parts import divide

SIZES = {"test": 20000, "dev": 2500, "fit": 5000}
NAMES = ("negative", "positive")


def convert(read: Callable[[str], bytes], out: Path) -> None:
    """`out/reviews/{train,fit,dev,test}.csv` with `text` and `label`; no text is in two of them."""
    folder = out / "reviews"
    folder.mkdir(parents=True, exist_ok=True)
    reviews = {review["t"]: review["s"] for review in json.loads(read("reviews.json"))}
    texts, labels = list(reviews), np.array([*reviews.values()], dtype=np.int64)
    for part, rows in divide(labels, SIZES, "train").items():
        with (folder / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            writer.writerows((texts[row], NAMES[labels[row]]) for row in rows)
