"""IMDB reviews as token numbers, and the encoder with a fresh head in half precision: little enough to be carried."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from convert import weights
from convert.imdb import SIZES
from convert.parts import divide

LENGTH = 128


def convert(read: Callable[[str], bytes], out: Path) -> None:
    """`out/model/`, and `out/tokens/PART.npz` with `x` (n, 128) uint16, padded with zeros, and `y` (n,): the parts of
    imdb-minilm, each review cut to 128 tokens."""
    weights.minilm(read, out)
    stored = out / "model" / "model.safetensors"
    save_file({name: value.to(torch.float16) for name, value in load_file(stored).items()}, stored, {"format": "pt"})
    folder = out / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(out / "model" / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    reviews = {review["t"]: review["s"] for review in json.loads(read("reviews.json"))}
    texts, labels = list(reviews), np.array([*reviews.values()], dtype=np.uint8)
    rows = np.array([one.ids for one in tokenizer.encode_batch_fast(texts)], np.uint16)
    for part, chosen in divide(labels.astype(np.int64), SIZES, "train").items():
        np.savez_compressed(folder / f"{part}.npz", x=rows[chosen], y=labels[chosen])
