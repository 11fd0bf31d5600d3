"""A run's record as the report looks at it: which soup to show, who is best alone, how scores are written.

The files themselves are read, and their shapes checked, by `run.record`. Parts that a run does not have (it was
stopped, or cooked one soup only) are empty or None here, never an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stockpot.run.record import METHODS, SOUP, MethodRecord, read_run, slug
from stockpot.soups.registry import LEARNED
from stockpot.table import Score
from stockpot.words import Metric

Numbers = NDArray[np.float64]


class Method:
    """One cooked method."""

    def __init__(self, record: MethodRecord) -> None:
        self.name, self.result = record.name, record.result
        self.W = record.W  # (K, G)
        self.groups: list[str] = record.result["groups"]
        self.notes: list[str] = record.result["notes"]
        self.learned = record.name in LEARNED
        # By kind of data, most honest first, and by set; a set without a finite score is not there.
        given = {"report": record.result["reports"]} | {one: {one: record.result[one]} for one in ("held_out", "fit")}
        read = {kind: {name: Score.read(one) for name, one in sets.items()} for kind, sets in given.items()}
        known = {kind: {name: one for name, one in sets.items() if one is not None} for kind, sets in read.items()}
        self.scores = {kind: sets for kind, sets in known.items() if sets}

    @cached_property
    def weight(self) -> Numbers | None:
        """Mean weight of each ingredient over the groups. (K,)"""
        return None if self.W is None else np.asarray(self.W.mean(axis=1))

    @property
    def best_known(self) -> float:
        """Its value on the most honest data there is."""
        return next((score.value for sets in self.scores.values() for score in sets.values()), -math.inf)


class Run:
    """A run, finished or not."""

    def __init__(self, path: Path) -> None:
        record = read_run(path)
        self.path, self.about, self.pool, self.recipe = record.path, record.about, record.pool, record.recipe
        lists: dict[str, Any] = {name: {} for name in ("differences", "failed", "absent")}
        self.results = {"recommended": None, "baseline": "best", "verdict": "", **lists, **record.results}
        self.methods = [Method(one) for one in record.methods]
        self.metric = Metric(self.about["metric"], self.about["unit"])
        own = self.about.get("report_metrics", {})  # of sets that are judged by a metric of their own
        self._metrics = {name: Metric(one["metric"], one["unit"]) for name, one in own.items()}
        self.ingredients: list[Mapping[str, Any]] = record.pool.get("ingredients", [])
        self.outlier: int | None = record.pool.get("outlier")  # who stands apart, as `stockpot inspect` says it
        rows = next((len(m.W) for m in self.methods if m.W is not None), 0)
        # A run that was stopped before the pool was written has numbers instead of names.
        self.names = [one["name"] for one in self.ingredients] or [f"ingredient {k + 1}" for k in range(rows)]
        own = [Score.read(one["fit"]) for one in self.ingredients] or [None] * len(self.names)
        # (K,) on the fitting data
        self.own_scores = np.array([math.nan if score is None else score.value for score in own])
        self.best_first = sorted(range(len(own)), key=lambda k: (-np.nan_to_num(self.own_scores[k], nan=-1e30), k))

    def metric_of(self, part: str) -> Metric:
        """Of a set of data."""
        return self._metrics.get(part, self.metric)

    @property
    def chosen(self) -> Method | None:
        """Whose soup is the run's: the best on held-out data, or what was asked for."""
        chosen = next((m for m in self.methods if m.name == self.results["recommended"]), None)
        return chosen or (self.methods[0] if len(self.methods) == 1 else None)

    @property
    def best_alone(self) -> int | None:
        """The ingredient that is the best single model, where that is known."""
        best = next((m.W for m in self.methods if m.name == self.results["baseline"]), None)
        return None if best is None else int(best[:, 0].argmax())

    @property
    def soup(self) -> Path | None:
        """The saved soup of the recommended method."""
        chosen = self.chosen
        folder = None if chosen is None else self.path / METHODS / slug(chosen.name) / SOUP
        return folder if folder is not None and folder.is_dir() and not folder.is_symlink() else None

    @property
    def showpiece(self) -> Method | None:
        """The soup whose weights the charts show: the recommended one if it is learned, else the best learned one."""
        able = [m for m in self.methods if m.W is not None and m.W.size]
        if self.chosen in able and (self.chosen.learned or len(able) == 1):
            return self.chosen
        return max(able, key=lambda m: (m.learned, m.best_known), default=None)
