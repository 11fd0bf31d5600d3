"""How the mixing weights of a soup are distributed, in a few hundred numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from stockpot.report.charts.coefficients import outside
from stockpot.report.record import Method

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
BARS = 80


def distribution(method: Method) -> dict[str, Any]:
    W = method.W
    assert W is not None  # (K, G)
    low, high = float(np.quantile(W, 0.001)), float(np.quantile(W, 0.999))
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    # The outermost bars also count what lies beyond them.
    counts, edges = np.histogram(np.clip(W, low, high), bins=BARS, range=(low, high))
    return {
        "models": W.shape[0],
        "groups": W.shape[1],
        "edges": [float(edges[0]), float(edges[-1])],
        "counts": counts.tolist(),
        "outside": float(outside(W).mean()),  # below 0 or above 1
        "near_zero": float((np.abs(W) < 0.1).mean()),
        "quantiles": dict(zip(map(str, QUANTILES), np.quantile(W, QUANTILES).tolist(), strict=True)),
        "by_ingredient": W.mean(axis=1).tolist(),
        "by_group": {
            name: np.quantile(W[:, g], (0.05, 0.5, 0.95)).tolist() for g, name in enumerate(method.groups)
        },
    }
