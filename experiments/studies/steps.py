"""Optimiser steps: how many a method will take, and how many it took."""

from __future__ import annotations

import json
from pathlib import Path

from stockpot.soups.blocks import blocks_for
from stockpot.soups.settings import LEARNED, Settings
from stockpot.soups.track import steps_for


def visits(settings: Settings, models: int) -> int:
    """The paper's T: how many blocks are visited."""
    return len(blocks_for(settings, models))


def inside(settings: Settings, samples: int) -> int:
    """Samples one fold learns from."""
    return samples if settings.folds == 1 else samples - samples // settings.folds


def planned(method: str, settings: Settings, models: int, samples: int | None) -> int | None:
    """All folds and blocks together; None where that depends on how many samples there are."""
    if method not in LEARNED:
        return 0
    if settings.steps is None and samples is None:
        return None
    per_block = steps_for(settings, inside(settings, samples or 0))
    return settings.folds * visits(settings, models) * per_block


def counted(events: Path) -> dict[str, int]:
    """Steps of each method as events.jsonl tells them; one that was repeated after an interruption counts once."""
    seen: dict[str, set[tuple[int, int, int]]] = {}
    method = None
    for line in events.read_text("utf-8").splitlines() if events.is_file() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # torn by an interruption
        if event["kind"] == "method":
            method = event["method"]
        elif event["kind"] == "growth":
            break  # the same methods again, on parts of the pool
        elif event["kind"] == "step" and method is not None:
            seen.setdefault(method, set()).add((event["fold"], event["block"], event["step"]))
    return {name: len(places) for name, places in seen.items()}
