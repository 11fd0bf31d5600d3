"""A tiny zoo in a folder of its own, as experiments/ has them, and made-up results of known shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo import fine_tunes, mlp, samples, write

MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
"""
RECIPE = """
pool: {path: pool}
model: {python: "model:build"}
data: {arrays: data.npz, fit: fit, report: test}
method:
  steps: 8
  lr: 0.05
  each: {crossfit: {steps: 8, lr: 0.05}}
  batch_size: 16
  methods: [best, uniform, greedy, learned+, mehl+, crossfit, ensemble]
"""


def make(home: Path, name: str = "tiny", models: int = 5) -> Path:
    """home/tiny with its pool, its data and its recipe; returns home."""
    folder = home / name
    write(folder / "pool", fine_tunes(mlp, models))
    arrays: dict[str, Any] = {}
    for seed, part in enumerate(("fit", "test", "dev", "train")):
        x, y = samples(60, seed=seed)
        arrays[f"x_{part}"], arrays[f"y_{part}"] = x.numpy(), y.numpy()
    np.savez(folder / "data.npz", **arrays)
    (folder / "model.py").write_text(MODEL)
    (folder / "recipe.yaml").write_text(RECIPE)
    return home


def score(mean: float) -> dict[str, Any]:
    return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01, "n": 1000, "loss": 0.5}


def method(name: str, mean: float, *, to_main: Sequence[float] | None = None, **settings: Any) -> dict[str, Any]:
    """One method of a run as `gather` writes it, with the settings that the tests change."""
    whole: dict[str, Any] = {
        "lr": 0.01,
        "steps": 1000,
        "epochs": None,
        "blocks": None,
        "passes": 1,
        "block_size": "auto",
    }
    whole |= {"seed": 0, **settings}
    folds = 4 if name == "crossfit" else 1
    return {
        "settings": whole,
        **{kind: score(mean) for kind in ("report", "fit")},
        "held_out": None,
        "seconds": 2.0,
        "peak_host": 2**30,
        "peak_device": 0,
        "models_used": 8,
        "notes": [],
        "guard": None,
        "steps": folds * whole["steps"],
        "epochs": 5.0,
        "b": 8,
        "T": 1,
        "J": whole["steps"],
        "to_main": to_main,
    }


def run(methods: dict[str, Any], *, models: int = 8, seed: int = 0) -> dict[str, Any]:
    return {
        "created": "2026-01-02T03:04:05+00:00",
        "command": ["stockpot", "compare"],
        "stockpot": "0.1.0",
        "machine": {"device": "cpu", "cpu": "a processor", "cores": 2, "memory": 2**34, "torch": "2.9"},
        "jobs": 1,
        "seed": seed,
        "data": "test",
        "statistics": "recalibrate",
        "models": models,
        "failed": {},
        "methods": methods,
        "differences": {},
    }


def results(runs: dict[str, Any], over_seeds: dict[str, Any], name: str = "tiny") -> dict[str, Any]:
    return {
        "format": 1,
        "zoo": name,
        "ingredients": [],
        "parameters": 10,
        "over_seeds": over_seeds,
        "variants": {},
        "coefficients": {},
        "runs": runs,
    }


def summary(mean: float, minus: Sequence[float] | None = None) -> dict[str, Any]:
    found = {
        "seeds": [0, 1, 2],
        "report": [mean, mean - 0.01, mean + 0.01],
        "n": 1000,
        "by_seed": [mean] * 3,
        "spread": 0.0,
        "fit": mean,
        "seconds": [2.0, 2.0, 2.0],
    }
    return found if minus is None else {**found, "default_minus": list(minus)}
