"""The tables of a report: methods, ingredients, what greedy and the guard decided, facts about pool and machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stockpot.report import words
from stockpot.report.reading import KINDS, Method, Run, Score, read

HEADINGS = ("method", "score", "95 % interval", "vs. best single model", "time", "peak memory", "models used")
DATA = {"report": "report data", "held_out": "held-out data", "fit": "fitting data"}


@dataclass(frozen=True)
class Row:
    """What one method reached and cost. `kind` is the data it was scored on: report, held_out or fit."""

    method: str
    metric: words.Metric
    kind: str
    score: Score | None
    difference: tuple[float, float, float] | None  # to the best individual: mean, low, high; paired, 95 %
    seconds: float | None
    peak_host: int
    peak_device: int
    models_used: int
    recommended: bool
    baseline: bool
    servable: bool  # one model to serve; the ensemble is not

    @property
    def peak(self) -> int:
        """The scarce memory: of the device where one was used, else of the host."""
        return self.peak_device or self.peak_host

    def cells(self) -> tuple[str, ...]:
        """As text, in the order of `HEADINGS`."""
        score, difference = self.score, self.difference
        between = "–" if score is None else f"{self.metric.bare(score.low)} to {self.metric.bare(score.high)}"
        return (
            self.method,
            "–" if score is None else self.metric.value(score.value),
            between,
            "–" if difference is None else _change(self.metric, *difference),
            words.seconds(self.seconds),
            words.size(self.peak),
            str(self.models_used),
        )


def summary_rows(run_dir: Path) -> list[Row]:
    """One row per finished method, in the table's order."""
    return rows_of(read(run_dir))


def rows_of(run: Run) -> list[Row]:
    return [_row(run, method, common_kind(run, method)) for method in run.methods]


def common_kind(run: Run, method: Method | None = None) -> str:
    """The most honest data that all methods were scored on: scores on different data must not be compared."""
    for kind in KINDS:
        if run.methods and all(m.score(kind) is not None for m in run.methods):
            return kind
    own = [kind for kind in KINDS if method is not None and method.score(kind) is not None]
    return own[0] if own else "fit"


def _row(run: Run, method: Method, kind: str) -> Row:
    result = method.result
    return Row(
        method.name,
        run.metric,
        kind,
        method.score(kind),
        _difference(run, method, kind),
        result.get("seconds"),
        int(result.get("peak_host") or 0),
        int(result.get("peak_device") or 0),
        int(result.get("models_used") or 0),
        recommended=method is run.recommended,
        baseline=method is run.baseline,
        servable=method.name != "ensemble",
    )


def _difference(run: Run, method: Method, kind: str) -> tuple[float, float, float] | None:
    """To the best individual: paired, worked out when the record was written."""
    found = (run.results.get("differences") or {}).get(method.name)
    if run.results.get("compared_on") != kind or not found or any(x is None for x in found):
        return None
    difference, low, high = map(float, found)
    return difference, low, high


def _change(metric: words.Metric, mean: float, low: float, high: float) -> str:
    return f"{metric.change(mean)} ({metric.change(low)} to {metric.change(high)})"


def ingredient_table(run: Run) -> tuple[list[dict[str, str]], list[str]]:
    """One line per ingredient with its own score, its weight, and how it was trained."""
    shown: Method | None = run.showpiece
    weight = shown.weight if shown else None
    odd = run.outlier
    trials = [item.get("trial") or {} for item in run.ingredients]
    settings = list(dict.fromkeys(str(key) for trial in trials for key in trial))[:8]
    lines = []
    for k in run.best_first if run.ingredients else []:
        score = run.own_scores[k]
        line = {
            "ingredient": run.names[k] + (" (outlier)" if k == odd else ""),
            "own score": "–"
            if math.isnan(score)
            else run.metric.value(float(score)) + run.metric.between(_ends(run.ingredients[k].get("fit"))),
        }
        if weight is not None and shown is not None:
            line[f"weight in {shown.name}"] = f"{weight[k]:.3f}".replace("-", "−")
        line.update({key: _text(trials[k].get(key, "")) for key in settings})
        line["digest"] = str(run.ingredients[k].get("digest") or "")[:8]
        lines.append(line)
    return lines, list(lines[0]) if lines else []


def _ends(score: Any) -> list[Any] | None:
    return [score.get("low"), score.get("high")] if isinstance(score, Mapping) else None


def pool_facts(run: Run) -> list[tuple[str, str]]:
    pool = run.pool
    facts = [("seed", run.about.get("seed")), ("recipe digest", str(run.about.get("recipe_digest") or "")[:16])]
    if pool:
        facts += [
            ("tensors", f"{pool.get('tensors', 0):,} of {words.count(int(pool.get('parameters') or 0))} parameters"),
            ("dtypes", ", ".join(f"{count} {name}" for name, count in (pool.get("dtypes") or {}).items())),
            ("size of one ingredient", words.size(_first(pool.get("ingredients"), "bytes"))),
        ]
        frozen, tied = len(pool.get("frozen") or []), len(pool.get("tied") or [])
        if frozen:
            facts.append(("the same in all ingredients", words.plural(frozen, "tensor")))
        if tied:
            facts.append(("tied within each ingredient", f"{words.plural(tied, 'group')} of tensors"))
        doubles = [" = ".join(run.names[k] for k in group) for group in pool.get("duplicates") or []]
        if doubles:
            facts.append(("equal ingredients", "; ".join(doubles)))
    return [(name, str(value)) for name, value in facts if value not in (None, "", "–")]


def machine_facts(run: Run) -> list[tuple[str, str]]:
    known = run.about.get("environment") or {}
    return [
        (str(key), words.size(value) if key == "memory" and isinstance(value, int) else _text(value))
        for key, value in known.items()
    ]


def _first(items: Any, key: str) -> float | None:
    return float(items[0][key]) if items and items[0].get(key) else None


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return str(value)


@dataclass(frozen=True)
class Decision:
    """What greedy did with one candidate."""

    ingredient: str
    added: bool
    score: str


def greedy_decisions(run: Run) -> tuple[list[Decision], str]:
    method = next((m for m in run.methods if m.result.get("greedy")), None)
    if method is None:
        return [], ""
    steps = method.result["greedy"]
    decisions = [
        Decision(
            str(step.get("ingredient", "")),
            bool(step.get("added")),
            "–" if step.get("score") is None else run.metric.value(float(step["score"])),
        )
        for step in steps
    ]
    kept = sum(decision.added for decision in decisions)
    summary = (
        f"Greedy went through {words.plural(len(decisions), 'ingredient')} from the best to the worst, adding"
        f" each to the average of those before it, and kept {kept}: the others did not raise the score on the"
        " fitting data. A dash stands for a candidate that was given up early, because it could not win any more."
    )
    return decisions, summary


def guard_decision(run: Run) -> tuple[list[tuple[str, str, bool]], str]:
    method = next((m for m in run.methods if m.result.get("guard")), None)
    if method is None:
        return [], ""
    guard = method.result["guard"]
    winner = str(guard.get("winner"))
    scores = [(str(name), Score.read(value)) for name, value in (guard.get("held_out") or {}).items()]
    intervals = guard.get("intervals") or {}
    table = [
        (name, run.metric.value(score.value) + run.metric.between(intervals.get(name)), name == winner)
        for name, score in scores
        if score is not None
    ]
    if winner == "learned":
        summary = (
            "The guard kept the learned soup: nothing simpler did better on held-out data than chance explains. Scored"
            " here are the folds' own soups; their average is usually better than they are."
        )
    else:
        summary = (
            f"The guard stepped in: {winner} did better on held-out data than chance explains, so {method.name}"
            f" returned {winner} instead of the learned soup."
        )
    return table, summary
