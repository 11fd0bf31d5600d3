"""Everything the report shows, worked out from a run; the template and the Markdown version only arrange it."""

from __future__ import annotations

import shlex
from typing import Any

from stockpot.report import words
from stockpot.report.charts.curves import curves
from stockpot.report.charts.drawing import Picture
from stockpot.report.charts.ingredients import distances, score_against_weight
from stockpot.report.charts.scores import comparison, growth
from stockpot.report.charts.weights import weights_by_group, weights_by_method
from stockpot.report.reading import Run
from stockpot.report.tables import (
    DATA,
    Row,
    common_kind,
    greedy_decisions,
    guard_decision,
    ingredient_table,
    machine_facts,
    pool_facts,
    rows_of,
)  # fmt: skip
from stockpot.soups.registry import METHODS


def page_of(run: Run) -> dict[str, Any]:
    """The report without its looks."""
    rows = rows_of(run)
    greedy, greedy_summary = greedy_decisions(run)
    guard, guard_summary = guard_decision(run)
    return {
        "title": run.about["title"] or run.path.name,
        "subtitle": _subtitle(run),
        "notices": _notices(run, rows),
        "verdict": run.results.get("verdict") or _verdict(rows),
        "tiles": _tiles(run, next((row for row in rows if row.recommended), None)),
        "rows": rows,
        "explained": {row.method: METHODS[row.method].summary for row in rows},
        "data": DATA[common_kind(run, run.recommended)],
        "pictures": _pictures(run, rows),
        "greedy": greedy,
        "greedy_summary": greedy_summary,
        "guard": guard,
        "guard_summary": guard_summary,
        "ingredients": ingredient_table(run),
        "facts": pool_facts(run),
        "command": shlex.join(run.about["command"]),
        "recipe": run.recipe.strip(),
        "environment": machine_facts(run),
        "notes": _notes(run),
        "version": run.about["stockpot"],
    }


def _notes(run: Run) -> list[tuple[str, str]]:
    """Each note with its method; what holds for all of them once."""
    several = len(run.methods) > 1
    shared = [n for n in run.methods[0].notes if all(n in m.notes for m in run.methods)] if several else []
    own = [(m.name, note) for m in run.methods for note in m.notes if note not in shared]
    return [("every method", note) for note in shared] + own


def _pictures(run: Run, rows: list[Row]) -> dict[str, Picture]:
    shown = run.showpiece
    found = {
        "comparison": comparison(rows),
        "weights": weights_by_group(run, shown) if shown else None,
        "pot": weights_by_method(run),
        "ingredients": score_against_weight(run, shown) if shown else None,
        "curves": curves(run),
        "distances": distances(run),
        "growth": growth(run),
    }
    return {name: chart for name, chart in found.items() if chart is not None}


def _subtitle(run: Run) -> str:
    names = [m.name for m in run.methods]
    alone = "their ensemble" if names == ["ensemble"] else f"one soup, by {names[0]}" if len(names) == 1 else ""
    parts = (
        words.plural(len(run.names), "ingredient") if run.names else "",
        f"{words.count(run.pool['parameters'])} parameters each" if run.pool else "",
        f"{len(names)} methods compared" if len(names) > 1 else alone,
        run.about["created"][:16].replace("T", " "),
    )
    return " · ".join(filter(None, parts))


def _notices(run: Run, rows: list[Row]) -> list[str]:
    notices = []
    if run.about["status"] != "done":
        word = "was interrupted" if run.about["status"] == "interrupted" else "is not finished"
        notices.append(f"This run {word}: the report shows what is there so far. Run the command again to continue.")
    if not rows:
        notices.append("No method has finished yet.")
    elif rows[0].kind == "fit":
        notices.append(
            "Scores are on the fitting data, because there is no score on report data for every method. They flatter"
            " the methods that learn; give report data to know what a soup is worth."
        )
    if len({row.kind for row in rows}) > 1:
        notices.append("The methods were scored on different data; their scores cannot be compared.")
    return notices + [f"{name} could not be cooked: {reason}" for name, reason in run.results["failed"].items()]


def _tiles(run: Run, row: Row | None) -> list[tuple[str, str, str]]:
    """Numbers worth a glance: (number, what it is, "good", "bad" or nothing)."""
    if row is None:
        return []
    tiles, m = [], row.metric
    if row.score is not None:
        between = f" (95 %: {m.bare(row.score.low)} to {m.bare(row.score.high)})"
        what = f"{row.method} on {DATA[row.kind]}, {row.score.n:,} examples{between}"
        tiles.append((m.value(row.score.value), what, ""))
    if row.difference is not None:
        mean, low, high = row.difference
        tone = "good" if low > 0 else "bad" if high < 0 else ""
        what = f"against the best single model (95 %: {m.change(low)} to {m.change(high)})"
        tiles.append((f"{m.change(mean)} {m.unit}".strip(), what, tone))
    serve, what = (1, "model to serve") if row.servable else (len(run.names), "models to serve")
    tiles.append((str(serve), f"{what}; {row.models_used} of {words.plural(len(run.names), 'ingredient')} used", ""))
    return [*tiles, (words.seconds(row.seconds), f"to cook it, with {words.size(row.peak)} of memory at most", "")]


def _verdict(rows: list[Row]) -> str:
    """For runs that were stopped before they wrote their own."""
    scored = [(row.score.value, row) for row in rows if row.score is not None]
    if not scored:
        return "Nothing has been scored yet."
    best = max(scored, key=lambda pair: pair[0])[1]
    score, between = best.cells()[1:3]
    return f"So far {best.method} scores highest: {score} on the {DATA[best.kind]} (95 % interval {between})."
