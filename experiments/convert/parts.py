"""Which labelled samples become which part: every part a file of its own, so that no setting can mix them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stockpot.adapters.splits import stratified_order

Array = np.ndarray[Any, Any]


def divide(labels: Array, sizes: Mapping[str, int], rest: str) -> dict[str, Array]:
    """Row numbers of each part, shuffled and with the classes in proportion; the rest of the rows go to `rest`.

    The order is a pure function of the labels. `fit` is what soups are learned on, `dev` stands in for `test`
    wherever a choice about methods has to be made, and `held` joins the data set's own test samples: with 10,000 of
    those alone, a difference of two methods would be known to no more than 0.3 points.
    """
    order = stratified_order(len(labels), labels, seed=0)
    ends = np.cumsum([*sizes.values()])
    if ends[-1] >= len(labels):
        raise ValueError(f"expected more than {ends[-1]} samples, found {len(labels)}")
    pieces = np.split(order, ends)
    return dict(zip([*sizes, rest], pieces, strict=True))
