"""Learning curves for the record: every loss is in events.jsonl, a chart needs a few hundred points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stockpot.run.scores import number

POINTS = 200  # per fold and block


def curves(history: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """`fit` (means over stretches of steps) and `held_out` (as evaluated), one curve per fold and block."""
    fit: dict[tuple[int, int], list[tuple[int, float]]] = {}
    held_out: dict[tuple[int, int], list[tuple[int, float | None]]] = {}  # None: it was not finite
    for entry in history:
        if entry["kind"] == "step":
            fit.setdefault((entry["fold"], entry["block"]), []).append((entry["step"] + 1, entry["loss"]))
        elif entry["kind"] == "held_out":
            held_out.setdefault((entry["fold"], entry["block"]), []).append((entry["step"], entry["loss"]))
    return {
        "fit": [_curve(place, _thinned(points)) for place, points in fit.items()],
        "held_out": [_curve(place, points) for place, points in held_out.items()],
    }


def _curve(place: tuple[int, int], points: Sequence[tuple[int, float | None]]) -> dict[str, Any]:
    fold, block = place
    losses = [None if y is None else number(y) for _, y in points]
    return {"fold": fold, "block": block, "x": [x for x, _ in points], "loss": losses}


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    width = -(-len(points) // POINTS)
    parts = [points[start : start + width] for start in range(0, len(points), width)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]
