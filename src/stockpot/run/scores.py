"""Scores as they stand in a run's JSON files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stockpot.task import Scores


def encode(scores: Scores | None) -> dict[str, Any] | None:
    if scores is None:
        return None
    low, high = scores.interval()
    value: dict[str, Any] = {
        "mean": number(scores.mean),
        "low": number(low),
        "high": number(high),
        "n": scores.n,
        "loss": number(scores.loss),
    }
    if scores.batches is not None:
        value["batches"] = list(scores.batches)  # scores known per batch only: intervals need this
    return value


def decode(value: Mapping[str, Any], values: Tensor) -> Scores:
    batches = value.get("batches")
    loss = value.get("loss")
    return Scores(
        values, math.nan if loss is None else loss, batches=None if batches is None else tuple(batches)
    )


def number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None
