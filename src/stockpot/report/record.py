"""Reads a run directory into plain values; docs/architecture.md says what stands where.

Parts that a run does not have (it was stopped, or cooked one soup only) are empty or None here, never an error; a file
that is there and cannot be understood is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stockpot import small_files
from stockpot.errors import RunError, describe
from stockpot.report.words import Metric, clean

Numbers = NDArray[np.float64]
FORMAT = 1
SIMPLE = ("best", "uniform", "greedy", "ensemble")  # everything else learned its weights
KINDS = ("report", "held_out", "fit")  # most honest first


@dataclass(frozen=True)
class Score:
    mean: float
    low: float
    high: float
    n: int
    loss: float | None = None  # None where a model has none; never NaN, which JSON cannot say

    @property
    def value(self) -> float:
        return self.mean

    @staticmethod
    def read(value: Any) -> Score | None:
        if isinstance(value, int | float):
            value = {"mean": value}
        if not isinstance(value, Mapping) or value.get("mean") is None:
            return None
        mean = float(value["mean"])
        low, high = (_number(value.get(end), mean) for end in ("low", "high"))
        return Score(mean, low, high, int(value.get("n") or 0), value.get("loss"))


@dataclass(frozen=True, eq=False)
class Method:
    """One cooked method. `values` are per-sample scores by kind of data."""

    name: str
    result: Mapping[str, Any]
    W: Numbers | None = None  # (K, G)
    values: Mapping[str, Numbers] = field(default_factory=dict)  # each (n,)

    @property
    def learned(self) -> bool:
        return self.name not in SIMPLE

    @property
    def groups(self) -> list[str]:
        named = [str(name) for name in self.result.get("groups") or []]
        width = 0 if self.W is None else self.W.shape[1]
        return named if len(named) == width else [f"group {g + 1}" for g in range(width)]

    @property
    def notes(self) -> list[str]:
        return [str(note) for note in self.result.get("notes") or []]

    @property
    def weight(self) -> Numbers | None:
        """Mean weight of each ingredient over the groups. (K,)"""
        if self.W is None or not self.W.size:
            return None
        mean: Numbers = self.W.mean(axis=1)
        return mean

    def score(self, kind: str) -> Score | None:
        return Score.read(self.result.get(kind))

    def curves(self, kind: str) -> Sequence[Mapping[str, Any]]:
        found = self.result.get("curves") or {}
        return found.get(kind) or []


@dataclass(frozen=True, eq=False)
class Run:
    path: Path
    about: Mapping[str, Any]  # run.json
    pool: Mapping[str, Any]  # pool.json
    results: Mapping[str, Any]  # results.json
    recipe: str
    methods: tuple[Method, ...]

    @property
    def metric(self) -> Metric:
        return Metric(str(self.about.get("metric") or "accuracy"))

    @property
    def ingredients(self) -> Sequence[Mapping[str, Any]]:
        return self.pool.get("ingredients") or []

    @cached_property
    def names(self) -> list[str]:
        """Of the ingredients; numbers when the run was stopped before the pool was written."""
        known = [str(item.get("name", k + 1)) for k, item in enumerate(self.ingredients)]
        rows = next((m.W.shape[0] for m in self.methods if m.W is not None), 0)
        return known or [f"ingredient {k + 1}" for k in range(rows)]

    @cached_property
    def own_scores(self) -> Numbers:
        """Each ingredient's own score on the fitting data; NaN where it is not known. (K,)"""
        scores = [Score.read(item.get("fit")) for item in self.ingredients]
        found = [math.nan if score is None else score.mean for score in scores]
        return np.array(found or [math.nan] * len(self.names), dtype=np.float64)

    @property
    def best_first(self) -> list[int]:
        """Ingredients by their own score; in the pool's order where that is unknown."""
        return sorted(
            range(len(self.names)), key=lambda k: (-np.nan_to_num(self.own_scores[k], nan=-1e30), k)
        )

    def method(self, name: object) -> Method | None:
        return next((m for m in self.methods if m.name == name), None)

    @property
    def baseline(self) -> Method | None:
        return self.method(self.results.get("baseline") or "best")

    @property
    def recommended(self) -> Method | None:
        chosen = self.method(self.results.get("recommended"))
        return chosen or (self.methods[0] if len(self.methods) == 1 else None)

    @property
    def showpiece(self) -> Method | None:
        """The soup whose weights the charts show: the recommended one if it is learned, else the best learned one."""
        able = [m for m in self.methods if m.W is not None and m.W.size]
        if self.recommended in able and (self.recommended.learned or len(able) == 1):
            return self.recommended
        ranked = sorted(able, key=lambda m: (m.learned, m.groups != [], _best_score(m)), reverse=True)
        return ranked[0] if ranked else None


def read(run_dir: Path) -> Run:
    if not (run_dir / "run.json").is_file():
        found = "no such directory" if not run_dir.is_dir() else "a directory without one"
        raise RunError(
            describe(
                f"run directory {run_dir}",
                expected="a run with its run.json",
                found=found,
                fix="give the directory that `stockpot cook`, `compare` or `demo` wrote",
            )
        )
    about = _json(run_dir / "run.json")
    if about.get("format") != FORMAT:
        raise RunError(
            describe(
                str(run_dir / "run.json"),
                expected=f"format {FORMAT}",
                found=f"format {about.get('format')!r}",
                fix="use the version of stockpot that wrote this run",
            )
        )
    pool = _json(run_dir / "pool.json", {})
    results = _json(run_dir / "results.json", {})
    recipe = run_dir / "recipe.yaml"
    text = clean(recipe.read_text("utf-8", errors="replace")) if recipe.is_file() else ""
    methods = [_method(path.parent) for path in sorted((run_dir / "methods").glob("*/result.json"))]
    order = [*(results.get("methods") or []), *SIMPLE]
    methods.sort(key=lambda m: (order.index(m.name) if m.name in order else len(order), m.name))
    run = Run(run_dir, about, pool, results, text, tuple(methods))
    _check_shapes(run)
    return run


def _method(folder: Path) -> Method:
    result = _json(folder / "result.json")
    name = str(result.get("method") or folder.name.replace("-plus", "+"))
    file = folder / "weights.safetensors"
    tensors: dict[str, Numbers] = {}
    if file.is_file():
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            tensors = {key: np.asarray(value, dtype=np.float64) for key, value in load_file(file).items()}
        except (SafetensorError, OSError) as error:
            raise _broken(file, "a readable safetensors file", str(error)) from error
    values = {kind: tensors[f"{kind}_values"] for kind in KINDS if f"{kind}_values" in tensors}
    return Method(name, result, tensors.get("W"), values)


def _check_shapes(run: Run) -> None:
    K = len(run.names)
    for method in run.methods:
        if method.W is not None and (method.W.ndim != 2 or method.W.shape[0] != K):
            file = run.path / "methods" / method.name.replace("+", "-plus") / "weights.safetensors"
            expected = f"W with one row for each of the {K} ingredients of pool.json"
            raise _broken(file, expected, f"shape {tuple(method.W.shape)}")


def _json(path: Path, default: Any = None) -> Any:
    if default is not None and not path.is_file():
        return default
    try:
        value = small_files.read_json(path)
    except (OSError, ValueError) as error:
        raise _broken(path, "readable JSON", str(error)) from error
    if not isinstance(value, dict):
        raise _broken(path, "a JSON object", type(value).__name__)
    return _cleaned(value)


def _cleaned(value: Any) -> Any:
    """Names come from files of strangers: what no page can carry is removed once, here."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, dict):
        return {clean(str(key)): _cleaned(item) for key, item in value.items()}
    return value


def _broken(path: Path, expected: str, found: str) -> RunError:
    return RunError(
        describe(
            str(path), expected=expected, found=found, fix="run the command again; it continues where it was"
        )
    )


def _number(value: Any, default: float) -> float:
    return default if value is None else float(value)


def _best_score(method: Method) -> float:
    found = [score.mean for kind in KINDS if (score := method.score(kind)) is not None]
    return found[0] if found else -math.inf
