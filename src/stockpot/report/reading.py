"""A run's record as the report looks at it: which soup to show, who is best alone, how scores are written.

The files themselves are read by `run.record.read_run`. Parts that a run does not have (it was stopped, or cooked one
soup only) are empty or None here, never an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stockpot.report.words import Metric
from stockpot.run.record import RunRecord, read_run
from stockpot.soups.registry import LEARNED

Numbers = NDArray[np.float64]
KINDS = ("report", "held_out", "fit")  # most honest first


@dataclass(frozen=True)
class Score:
    value: float
    low: float
    high: float
    n: int

    @staticmethod
    def read(given: Any) -> Score | None:
        if isinstance(given, int | float):
            given = {"value": given}
        if not isinstance(given, Mapping) or given.get("value") is None:
            return None
        value = float(given["value"])
        low, high = (value if given.get(end) is None else float(given[end]) for end in ("low", "high"))
        return Score(value, low, high, int(given.get("n") or 0))


@dataclass(frozen=True, eq=False)
class Method:
    """One cooked method."""

    name: str
    result: Mapping[str, Any]
    W: Numbers | None  # (K, G)

    @property
    def learned(self) -> bool:
        return self.name in LEARNED

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
    record: RunRecord

    @property
    def path(self) -> Path:
        return self.record.path

    @property
    def about(self) -> Mapping[str, Any]:
        return self.record.about

    @property
    def pool(self) -> Mapping[str, Any]:
        return self.record.pool

    @property
    def results(self) -> Mapping[str, Any]:
        return self.record.results

    @cached_property
    def methods(self) -> tuple[Method, ...]:
        return tuple(Method(m.name, m.result, m.W) for m in self.record.methods)

    @property
    def metric(self) -> Metric:
        return Metric(str(self.about.get("metric") or "score"), bool(self.about.get("percent")))

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
        found = [math.nan if score is None else score.value for score in scores]
        return np.array(found or [math.nan] * len(self.names), dtype=np.float64)

    @cached_property
    def best_first(self) -> list[int]:
        """Ingredients by their own score; in the pool's order where that is unknown."""
        return sorted(range(len(self.names)), key=lambda k: (-np.nan_to_num(self.own_scores[k], nan=-1e30), k))

    @property
    def outlier(self) -> int | None:
        """The ingredient that stands apart, by the same rule as `stockpot inspect`."""
        found = self.pool.get("outlier")
        return int(found) if isinstance(found, int) and 0 <= found < len(self.names) else None

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
    return Run(read_run(run_dir))


def _best_score(method: Method) -> float:
    found = [score.value for kind in KINDS if (score := method.score(kind)) is not None]
    return found[0] if found else -math.inf
