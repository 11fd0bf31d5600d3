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

from stockpot import words
from stockpot.run.record import METHODS, SOUP, MethodRecord, read_run, slug
from stockpot.run.verdict import advised
from stockpot.soups.registry import LEARNED, settings_for
from stockpot.soups.settings import as_json
from stockpot.table import DATA, Cell, Row, Score
from stockpot.words import Metric

Numbers = NDArray[np.float64]


class Method:
    """One cooked method."""

    def __init__(self, record: MethodRecord) -> None:
        self.record, self.name, self.result = record, record.name, record.result
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


def summary_rows(run_dir: Path) -> list[Row]:
    """One row per finished method, in the table's order."""
    return rows_of(Run(run_dir))


def rows_of(run: Run) -> list[Row]:
    return [_row(run, method, common_kind(run, method)) for method in run.methods]


def common_kind(run: Run, method: Method | None = None) -> str:
    """The most honest data that all methods were scored on: scores on different data must not be compared."""
    shared = [kind for kind in DATA if run.methods and all(kind in m.scores for m in run.methods)]
    own = [kind for kind in DATA if method is not None and kind in method.scores]
    return (shared or own or ["fit"])[0]


def _row(run: Run, method: Method, kind: str) -> Row:
    result, scores = method.result, method.scores.get(kind, {})
    names = dict.fromkeys(name for one in run.methods for name in one.scores.get(kind, {})) or {kind: None}
    known = run.results["differences"].get(method.name, {}) if run.results.get("compared_on") == kind else {}
    changes = {name: (one[0], one[1], one[2]) for name, one in known.items() if None not in one}
    return Row(
        method.name,
        kind,
        {name: Cell(run.metric_of(name), scores.get(name), changes.get(name)) for name in names},
        result["seconds"], result["peak_host"], result["peak_device"], result["models_used"],
        chosen=method is run.chosen,
        recommended=method is run.chosen and advised(run.results["verdict"]),
        baseline=method.name == run.results["baseline"],
        servable=method.W is not None,
    )  # fmt: skip


def ingredient_table(run: Run) -> list[dict[str, str]]:
    """One line per ingredient with its own score, its weight, and how it was trained."""
    shown = run.showpiece
    trials = [one["trial"] or {} for one in run.ingredients]
    settings = list(dict.fromkeys(key for trial in trials for key in trial))[:8]
    steps: list[Mapping[str, Any]] = next((m.result["greedy"] for m in run.methods if m.result["greedy"]), [])
    greedy = {step["ingredient"]: step["added"] for step in steps}
    lines = []
    for k in run.best_first if run.ingredients else []:
        one, score = run.ingredients[k], run.own_scores[k]
        own = "–" if math.isnan(score) else run.metric.value(score) + run.metric.between(one["fit"])
        line = {"ingredient": run.names[k] + (" (outlier)" if k == run.outlier else ""), "own score": own}
        if shown is not None and shown.weight is not None:
            line[f"weight in {shown.name}"] = f"{shown.weight[k]:.3f}".replace("-", "−")
        if greedy:
            line["in greedy"] = "✓" if greedy.get(run.names[k]) else ""
        far = run.pool["to_mean"][k]
        line["distance to the mean"] = "not finite" if far is None else f"{far:.3g}"
        lines.append({**line, **{key: _text(trials[k].get(key, "")) for key in settings}, "digest": one["digest"][:8]})
    return lines


def stands_apart(run: Run) -> str:
    """Whether an ingredient is unlike the others, and how long the distances are."""
    lengths = [math.nan if d is None else float(d) for d in run.pool.get("to_mean") or []]
    norms = [float(norm) for norm in run.pool.get("norms") or [] if norm is not None]
    known = sorted(d for d in lengths if math.isfinite(d))
    if not known or not norms:
        return ""
    middle, norm = known[len(known) // 2], sorted(norms)[len(norms) // 2]
    scale = f" Weights have a norm of {norm:.3g}, and lie {middle:.3g} from the mean of all (medians)."
    if run.outlier is None:
        few = "" if len(lengths) > 2 else "With so few ingredients nothing can be said of outliers."
        return (few or "No ingredient stands apart.") + scale
    name, far = words.middle(run.names[run.outlier], 60), lengths[run.outlier]
    if not math.isfinite(far):
        return f"{name} has weights that are not finite.{scale}"
    return f"The outlier is {name}: {far / middle:.1f} times as far from the mean of all as usual.{scale}"


def pool_facts(run: Run) -> list[tuple[str, str]]:
    pool = run.pool
    facts = {"seed": str(run.about["seed"]), "recipe digest": run.about["recipe_digest"][:16]}
    if pool:
        facts |= {
            "tensors": f"{pool['tensors']:,} of {words.count(pool['parameters'])} parameters",
            "dtypes": ", ".join(f"{count} {name}" for name, count in pool["dtypes"].items()),
            "size of one ingredient": words.size(run.ingredients[0]["bytes"]) if run.ingredients else "",
            "the same in all ingredients": words.plural(len(pool["frozen"]), "tensor") if pool["frozen"] else "",
            "tied within each ingredient": words.plural(len(pool["tied"]), "group") if pool["tied"] else "",
            "equal ingredients": "; ".join(" = ".join(run.names[k] for k in same) for same in pool["duplicates"]),
        }
    return [(name, value) for name, value in facts.items() if value not in ("", "–")]


def changed_settings(run: Run) -> list[tuple[str, str]]:
    """The settings of the methods that learn, as far as they are not the default; those of all of them once."""
    given: dict[str, dict[str, Any]] = {}
    for name, stated in run.about["settings"].items():
        if name in LEARNED:
            usual = as_json(settings_for(name, stated.get("preset")))
            own = {key: value for key, value in stated.items() if key == "preset" or usual.get(key) != value}
            given[name] = {key: value for key, value in own.items() if key != "seed"}  # a fact of the whole run
    first = next(iter(given.values()), {})
    shared = {k: v for k, v in first.items() if all(k in own and own[k] == v for own in given.values())}
    found = [(key, _text(value)) for key, value in shared.items()]
    for name, own in given.items():
        found += [(f"{key} of {name}", _text(value)) for key, value in own.items() if key not in shared]
    return found


def machine_facts(run: Run) -> list[tuple[str, str]]:
    return [
        (key, words.size(value) if key == "memory" and isinstance(value, int) else _text(value))
        for key, value in run.about["environment"].items()
    ]


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)


def guard_decision(run: Run) -> tuple[list[tuple[str, str, bool]], str]:
    """(soup, held-out score, returned) for everything the guard compared, and what it did in words."""
    method = next((m for m in run.methods if m.result["guard"]), None)
    if method is None:
        return [], ""
    guard = method.result["guard"]
    winner, ends = guard["winner"], guard["intervals"]
    table = [
        (name, run.metric.value(value) + run.metric.between(ends.get(name)), name == winner)
        for name, value in guard["held_out"].items()
        if value is not None
    ]
    if winner == "learned":
        return table, (
            "The guard kept the learned soup: nothing simpler did better on held-out data than chance explains. Scored"
            " here are the folds' own soups; their average is usually better than they are."
        )
    return table, (
        f"The guard stepped in: {winner} did better on held-out data than chance explains, so {method.name}"
        f" returned {winner} instead of the learned soup."
    )
