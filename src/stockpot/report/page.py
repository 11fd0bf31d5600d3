"""Everything the report shows, worked out from a run; templates only arrange it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stockpot.report import charts, glossary, words
from stockpot.report.charts.canvas import Picture
from stockpot.report.charts.distances import outlier
from stockpot.report.record import Method, Run, Score
from stockpot.report.rows import DATA, Row, common_kind, rows_of


@dataclass(frozen=True)
class Tile:
    """One number worth a glance."""

    value: str
    text: str
    tone: str = ""  # "good" or "bad"


@dataclass(frozen=True)
class Decision:
    """What greedy did with one candidate."""

    ingredient: str
    added: bool
    score: str


@dataclass(frozen=True)
class Page:
    """The report without its looks."""

    title: str
    subtitle: str
    notices: list[str]
    verdict: str
    tiles: list[Tile]
    rows: list[Row]
    explained: Mapping[str, str]
    data: str
    pictures: Mapping[str, Picture]
    showpiece: str
    greedy: list[Decision]
    greedy_summary: str
    guard: list[tuple[str, str, bool]]
    guard_summary: str
    ingredients: list[dict[str, str]]
    ingredient_columns: list[str]
    facts: list[tuple[str, str]]
    command: str
    recipe: str
    environment: list[tuple[str, str]]
    notes: list[tuple[str, str]]
    terms: tuple[tuple[str, str], ...]
    version: str


def page_of(run: Run) -> Page:
    rows = rows_of(run)
    greedy, greedy_summary = _greedy(run)
    guard, guard_summary = _guard(run)
    ingredients, columns = _ingredients(run)
    return Page(
        title=str(run.about.get("title") or run.path.name),
        subtitle=_subtitle(run),
        notices=_notices(run, rows),
        verdict=str(run.results.get("verdict") or _verdict(rows)),
        tiles=_tiles(run, rows),
        rows=rows,
        explained={row.method: glossary.METHODS.get(row.method, "") for row in rows},
        data=DATA[common_kind(run, run.recommended)],
        pictures=_pictures(run, rows),
        showpiece=run.showpiece.name if run.showpiece else "",
        greedy=greedy,
        greedy_summary=greedy_summary,
        guard=guard,
        guard_summary=guard_summary,
        ingredients=ingredients,
        ingredient_columns=columns,
        facts=_facts(run),
        command=shlex.join(str(word) for word in run.about.get("command") or []),
        recipe=run.recipe.strip(),
        environment=_environment(run),
        notes=_notes(run),
        terms=glossary.TERMS,
        version=str(run.about.get("stockpot") or ""),
    )


def _notes(run: Run) -> list[tuple[str, str]]:
    """Each note with its method; what holds for all of them once."""
    several = len(run.methods) > 1
    shared = [n for n in run.methods[0].notes if all(n in m.notes for m in run.methods)] if several else []
    own = [(m.name, note) for m in run.methods for note in m.notes if note not in shared]
    return [("every method", note) for note in shared] + own


def _pictures(run: Run, rows: list[Row]) -> dict[str, Picture]:
    shown = run.showpiece
    found = {
        "comparison": charts.comparison(rows),
        "weights": charts.weights_by_group(run, shown) if shown else None,
        "distribution": charts.distribution(run),
        "pot": charts.weights_by_method(run),
        "ingredients": charts.score_against_weight(run, shown) if shown else None,
        "curves": charts.curves(run),
        "distances": charts.distances(run),
        "growth": charts.growth(run),
        "cost": charts.cost(rows) if len(rows) > 1 else None,
    }
    return {name: chart for name, chart in found.items() if chart is not None}


def _subtitle(run: Run) -> str:
    parts = []
    if run.names:
        parts.append(f"{words.plural(len(run.names), 'ingredient')}")
    if run.pool.get("parameters"):
        parts.append(f"{words.count(int(run.pool['parameters']))} parameters each")
    if len(run.methods) > 1:
        parts.append(f"{len(run.methods)} methods compared")
    elif run.methods:
        only = run.methods[0].name
        parts.append("their ensemble" if only == "ensemble" else f"one soup, by {only}")
    created = str(run.about.get("created") or "")
    if created:
        parts.append(created[:16].replace("T", " "))
    return " · ".join(parts)


def _notices(run: Run, rows: list[Row]) -> list[str]:
    notices = []
    status = run.about.get("status")
    if status != "done":
        word = "was interrupted" if status == "interrupted" else "is not finished"
        notices.append(
            f"This run {word}: the report shows what is there so far. Run the command again to continue."
        )
    if not rows:
        notices.append("No method has finished yet.")
    if rows and rows[0].kind == "fit":
        notices.append(
            "Scores are on the fitting data, because there is no score on report data for every method. They flatter"
            " the methods that learn; give report data to know what a soup is worth."
        )
    kinds = {row.kind for row in rows}
    if len(kinds) > 1:
        notices.append("The methods were scored on different data; their scores cannot be compared.")
    for name, reason in (run.results.get("failed") or {}).items():
        notices.append(f"{name} could not be cooked: {reason}")
    return notices


def _tiles(run: Run, rows: list[Row]) -> list[Tile]:
    row = next((row for row in rows if row.recommended), None)
    tiles = []
    if row is not None and row.score is not None:
        n = f", {row.score.n:,} examples" if row.score.n else ""
        between = f" (95 %: {row.metric.bare(row.score.low)} to {row.metric.bare(row.score.high)})"
        tiles.append(Tile(row.metric.value(row.score.mean), f"{row.method} on {DATA[row.kind]}{n}{between}"))
    if row is not None and row.difference is not None:
        mean, low, high = row.difference
        tone = "good" if low > 0 else "bad" if high < 0 else ""
        unit = f" {row.metric.unit}" if row.metric.unit else ""
        between = f"{row.metric.change(low)} to {row.metric.change(high)}"
        tiles.append(
            Tile(f"{row.metric.change(mean)}{unit}", f"against the best single model (95 %: {between})", tone)
        )
    if row is not None and run.names:
        what = "models to serve" if not row.servable else "model to serve"
        serve = len(run.names) if not row.servable else 1
        tiles.append(
            Tile(
                str(serve), f"{what}; {row.models_used} of {words.plural(len(run.names), 'ingredient')} used"
            )
        )
    if row is not None and row.seconds is not None:
        tiles.append(
            Tile(words.seconds(row.seconds), f"to cook it, with {words.size(row.peak)} of memory at most")
        )
    return tiles


def _verdict(rows: list[Row]) -> str:
    """For runs that were stopped before they wrote their own."""
    scored = [row for row in rows if row.score is not None]
    if not scored:
        return "Nothing has been scored yet."
    best = max(scored, key=lambda row: row.score.mean if row.score else -math.inf)
    score, between = best.cells()[1:3]
    return f"So far {best.method} scores highest: {score} on the {DATA[best.kind]} (95 % interval {between})."


def _greedy(run: Run) -> tuple[list[Decision], str]:
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


def _guard(run: Run) -> tuple[list[tuple[str, str, bool]], str]:
    method = next((m for m in run.methods if m.result.get("guard")), None)
    if method is None:
        return [], ""
    guard = method.result["guard"]
    winner = str(guard.get("winner"))
    scores = [(str(name), Score.read(value)) for name, value in (guard.get("held_out") or {}).items()]
    intervals = guard.get("intervals") or {}
    table = [
        (name, run.metric.value(score.mean) + _between(run, intervals.get(name)), name == winner)
        for name, score in scores
        if score is not None
    ]
    if winner == "learned":
        summary = "The guard kept the learned soup: nothing simpler did better on data it had not seen."
    else:
        summary = (
            f"The guard stepped in: {winner} did better on data it had not seen, so {method.name}"
            f" returned {winner} instead of the learned soup."
        )
    return table, summary


def _ingredients(run: Run) -> tuple[list[dict[str, str]], list[str]]:
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
            else run.metric.value(float(score)) + _between(run, _ends(run.ingredients[k].get("fit"))),
        }
        if weight is not None and shown is not None:
            line[f"weight in {shown.name}"] = f"{weight[k]:.3f}".replace("-", "−")
        line.update({key: _text(trials[k].get(key, "")) for key in settings})
        line["digest"] = str(run.ingredients[k].get("digest") or "")[:8]
        lines.append(line)
    return lines, list(lines[0]) if lines else []


def _ends(score: Any) -> list[Any] | None:
    return [score.get("low"), score.get("high")] if isinstance(score, Mapping) else None


def _between(run: Run, ends: Any) -> str:
    """The 95 % interval in brackets, where it is known."""
    if not ends or any(end is None for end in ends):
        return ""
    low, high = (run.metric.bare(float(end)) for end in ends)
    return f" ({low} to {high})"


def _facts(run: Run) -> list[tuple[str, str]]:
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


def _environment(run: Run) -> list[tuple[str, str]]:
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
