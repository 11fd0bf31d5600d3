"""scikit-learn's handwritten digits: 1,797 grey images of 8 x 8, inside its package."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stockpot.errors import DataError, describe
from stockpot.task.data import generator

Split = Literal["train", "fit", "report"]
SIZES: dict[Split, int] = {"train": 250, "fit": 650, "report": 897}


def digits(split: Split, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) uint8 with labels (n,); the three splits share no image."""
    if split not in SIZES:
        raise DataError(
            describe(
                f"split {split!r} of the digits",
                expected=f"one of {', '.join(SIZES)}",
                found="an unknown one",
                fix="use 'fit' to learn mixing weights on",
            )
        )
    images, labels = _all()
    order = torch.randperm(len(labels), generator=generator("digits", seed))
    first = sum(size for name, size in SIZES.items() if list(SIZES).index(name) < list(SIZES).index(split))
    rows = order[first : first + SIZES[split]]
    return images[rows], labels[rows]


def _all() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            describe(
                "the digits of the demo",
                expected="scikit-learn, which has them inside",
                found="none",
                fix="pip install 'stockpot[demo]'",
            )
        ) from error
    found = load_digits()
    images = torch.from_numpy(found.images).unsqueeze(1)  # (1797, 1, 8, 8), 0 to 16
    return (images * (255 / 16)).round().to(torch.uint8), torch.from_numpy(found.target).long()
