"""What a run was made of: its ingredients one by one, facts about the pool, the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stockpot.report import words
from stockpot.report.charts.distances import outlier
from stockpot.report.record import Method, Run


def ingredient_table(run: Run) -> tuple[list[dict[str, str]], list[str]]:
    """One line per ingredient with its own score, its weight, and how it was trained."""
    shown: Method | None = run.showpiece
    weight = shown.weight if shown else None
    odd = outlier(run)
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
    facts = [
        ("seed", run.about.get("seed")),
        ("recipe digest", str(run.about.get("recipe_digest") or "")[:16]),
    ]
    if pool:
        facts += [
            (
                "tensors",
                f"{pool.get('tensors', 0):,} of {words.count(int(pool.get('parameters') or 0))} parameters",
            ),
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
