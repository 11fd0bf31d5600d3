"""Run records for tests: made-up ones of any shape, written the way docs/architecture.md says."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from stockpot.run.record import FORMAT

METHODS = ("best", "uniform", "greedy", "ensemble", "learned", "learned+", "mehl+", "crossfit")
GROUPS_PER_LAYER = ("attention.query.weight", "attention.query.bias", "mlp.weight", "mlp.bias")


def names(count: int, length: int = 0) -> list[str]:
    plain = [f"trial_{k:02d}" for k in range(count)]
    return (
        [f"{name}_{'long_name_' * 12}"[: length - 3] + f"_{k:02d}" for k, name in enumerate(plain)] if length else plain
    )


def write_record(
    folder: Path,
    *,
    models: int = 6,
    groups: int = 9,
    methods: Sequence[str] = METHODS,
    ingredients: Sequence[str] | None = None,
    samples: int = 300,
    kind: str = "compare",
    metric: str = "accuracy",
    sets: Sequence[str] = ("report",),  # of report data; none: no report data
    nan_losses: bool = False,
    guard_winner: str = "learned",
    seed: int = 0,
) -> Path:
    """A finished run. Scores rise with the order of the methods; the last one is recommended."""
    rng = np.random.default_rng(seed)
    labels = list(ingredients or names(models))
    own = np.sort(rng.uniform(0.6, 0.8, len(labels)))[::-1]
    hard = rng.uniform(size=samples)  # one draw for all methods, so that differences are paired
    folder.mkdir(parents=True)
    _json(folder / "run.json", _about(kind, metric))
    (folder / "recipe.yaml").write_text("pool:\n  paths: [zoo/*.safetensors]\n")
    _json(folder / "pool.json", _pool(labels, own, rng))
    shown: dict[str, NDArray[np.float64]] = {}
    for i, name in enumerate(methods):
        W = _weights(name, len(labels), groups, rng)
        fit = (hard < 0.82 + 0.01 * i).astype(np.float64)
        scored = (hard < 0.80 + 0.01 * i).astype(np.float64)
        result = {
            "method": name,
            "settings": {"lr": 0.01},
            "seconds": 0.4 * 2**i,
            "peak_host": 300 * 2**20 + i * 2**24,
            "peak_device": 0,
            "models_used": 1 if name == "best" else len(labels),
            "notes": [f"a note on {name}"] if name == "best" else [],
            "fit": score(fit),
            "held_out": score(fit) if name == "crossfit" else None,
            # On every further set the later methods are worse: they forgot.
            "reports": {one: score(scored if n == 0 else 1 - scored) for n, one in enumerate(sets)},
            "groups": [] if W is None else group_names(W.shape[1]),
            "curves": _curves(name, rng, nan_losses),
            "greedy": _greedy(labels, own) if name == "greedy" else None,
            "guard": _guard(guard_winner) if name == "crossfit" else None,
        }
        place = folder / "methods" / name.replace("+", "-plus")
        place.mkdir(parents=True)
        save_file({} if W is None else {"W": W}, place / "weights.safetensors")
        shown[name] = scored if sets else fit
        _json(place / "result.json", result)
    chosen = methods[-1]
    _json(
        folder / "results.json",
        {
            "methods": list(methods),
            "recommended": chosen,
            "verdict": f"Use it: {chosen} gains.\nIt is better than the best single model.",
            "baseline": "best" if "best" in methods else None,
            "compared_on": "report" if sets else "fit",
            "differences": {
                name: {
                    one: difference((values - shown["best"]) * (1 if n == 0 else -1))
                    for n, one in enumerate(sets or ["fit"])
                }
                for name, values in shown.items()
                if name != "best" and "best" in shown
            },
            "held_out": {},
            "failed": {},
            "absent": {},
        },
    )
    return folder


def score(values: NDArray[np.float64]) -> dict[str, Any]:
    mean = float(values.mean())
    half = 1.96 * math.sqrt(max(mean * (1 - mean), 1e-9) / len(values))
    return {"value": mean, "low": mean - half, "high": mean + half, "n": len(values), "loss": None}


def difference(paired: NDArray[np.float64]) -> list[float]:
    mean = float(paired.mean())
    half = 1.96 * float(paired.std()) / math.sqrt(len(paired))
    return [mean, mean - half, mean + half]


def group_names(count: int) -> list[str]:
    if count == 1:
        return ["model"]
    per = len(GROUPS_PER_LAYER)
    inner = [f"encoder.layer.{g // per}.{GROUPS_PER_LAYER[g % per]}" for g in range(count - 1)]
    return [*inner, "head.weight"]


def edit(path: Path, **changes: Any) -> None:
    """Change top-level keys of one JSON file of a record."""
    _json(path, {**json.loads(path.read_text()), **changes})


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _about(kind: str, metric: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": kind,
        "created": "2024-05-01T10:11:12+00:00",
        "stockpot": "0.0.test",
        "command": ["stockpot", kind, "my recipe.yaml"],
        "seed": 3,
        "recipe_digest": "0123456789abcdef" * 4,
        "status": "done",
        "title": "Toy digits",
        "code": {},
        "settings": {},
        "layout": {},
        "fit_digest": "f" * 64,
        "report_digests": {},
        "metric": metric,
        "unit": "%" if metric == "accuracy" else "nats" if metric == "nats_per_token" else "",
        "environment": {"python": "3.11", "cores": 2, "memory": 8 * 2**30, "libraries": {"numpy": "2.0"}},
    }


def _pool(labels: list[str], own: NDArray[np.float64], rng: np.random.Generator) -> dict[str, Any]:
    places = rng.normal(size=(len(labels), 3))
    places[-1] *= 9  # the outlier
    pairs = np.linalg.norm(places[:, None] - places[None], axis=2)
    return {
        "ingredients": [
            {
                "name": name,
                "path": f"zoo/{k}.safetensors",
                "format": "safetensors",
                "bytes": 90_000_000,
                "digest": f"{k:064x}",
                "fit": {"value": own[k], "low": own[k] - 0.02, "high": own[k] + 0.02, "n": 300, "loss": 0.5},
                "trial": {"lr": 1e-3 * (k + 1), "epochs": k},
            }
            for k, name in enumerate(labels)
        ],
        "parameters": 22_700_000,
        "tensors": 152,
        "dtypes": {"float32": 152},
        "frozen": ["embeddings.position"],
        "tied": [],
        "duplicates": [],
        "distances": pairs.tolist(),
        "to_mean": np.linalg.norm(places - places.mean(axis=0), axis=1).tolist(),
        "outlier": len(labels) - 1 if len(labels) > 2 else None,
        "base": None,
        "norms": np.linalg.norm(places, axis=1).tolist(),
    }


def _weights(name: str, models: int, groups: int, rng: np.random.Generator) -> NDArray[np.float64] | None:
    if name == "ensemble":
        return None
    width = groups if name.endswith("+") or name == "crossfit" else 1
    if name == "best":
        W = np.zeros((models, 1))
        W[0] = 1
        return W
    if name == "greedy":
        W = np.zeros((models, 1))
        W[:2] = 0.5
        return W
    raw = rng.normal(size=(models, width))
    if name.startswith("learned"):
        soft = np.exp(2 * raw)
        return np.asarray(soft / soft.sum(axis=0))
    W = np.full((models, width), 1 / models)
    return W if name == "uniform" else np.asarray(W + 0.1 * (raw - raw.mean(axis=0)))


def _curves(name: str, rng: np.random.Generator, nan_losses: bool) -> dict[str, Any]:
    if name in ("best", "uniform", "greedy", "ensemble"):
        return {"fit": [], "held_out": []}
    folds, blocks = (4, 2) if name == "crossfit" else (1, 2 if name.startswith("mehl") else 1)
    fit, held_out = [], []
    for fold in range(folds):
        for block in range(blocks):
            x = list(range(1, 41))
            loss: list[float | None] = [0.5 + 0.4 * math.exp(-(s + 40 * block) / 15) + 0.03 * rng.normal() for s in x]
            if nan_losses:
                loss[10:15] = [None] * 5
            fit.append({"fold": fold, "block": block, "x": x, "loss": loss})
            if folds > 1:
                at = list(range(0 if block == 0 else 4, 41, 4))
                later = [0.6 + 0.3 * math.exp(-(s + 40 * block) / 12) + 0.02 * fold for s in at]
                held_out.append({"fold": fold, "block": block, "x": at, "loss": later})
    return {"fit": fit, "held_out": held_out}


def _greedy(labels: list[str], own: NDArray[np.float64]) -> list[dict[str, Any]]:
    return [
        {
            "kind": "greedy",
            "ingredient": name,
            "index": k,
            "added": k < 2,
            "score": None if k > 3 else float(own[0]) + 0.01 * k,
            "evaluated": 300,
        }
        for k, name in enumerate(labels)
    ]


def _guard(winner: str) -> dict[str, Any]:
    held_out = {"learned": 0.85, "best": 0.80, "uniform": 0.79, "greedy": 0.83}
    intervals = {name: [value - 0.02, value + 0.02] for name, value in held_out.items()}
    return {"held_out": held_out, "intervals": intervals, "over_learned": {}, "winner": winner}
