"""Everything the report shows, worked out from a run; templates only arrange it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from stockpot.report import words
from stockpot.report.charts.curves import curves
from stockpot.report.charts.drawing import Picture
from stockpot.report.charts.ingredients import distances, score_against_weight
from stockpot.report.charts.scores import comparison, cost, growth
from stockpot.report.charts.weights import distribution, weights_by_group, weights_by_method
from stockpot.report.reading import Run
from stockpot.report.tables import (
    DATA,
    Decision,
    Row,
    common_kind,
    greedy_decisions,
    guard_decision,
    ingredient_table,
    machine_facts,
    pool_facts,
    rows_of,
)
from stockpot.soups.registry import METHODS


@dataclass(frozen=True)
class Tile:
    """One number worth a glance."""

    value: str
    text: str
    tone: str = ""  # "good" or "bad"


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
    version: str


def page_of(run: Run) -> Page:
    rows = rows_of(run)
    greedy, greedy_summary = greedy_decisions(run)
    guard, guard_summary = guard_decision(run)
    ingredients, columns = ingredient_table(run)
    return Page(
        title=str(run.about.get("title") or run.path.name),
        subtitle=_subtitle(run),
        notices=_notices(run, rows),
        verdict=str(run.results.get("verdict") or _verdict(rows)),
        tiles=_tiles(run, rows),
        rows=rows,
        explained={row.method: METHODS[row.method].summary if row.method in METHODS else "" for row in rows},
        data=DATA[common_kind(run, run.recommended)],
        pictures=_pictures(run, rows),
        showpiece=run.showpiece.name if run.showpiece else "",
        greedy=greedy,
        greedy_summary=greedy_summary,
        guard=guard,
        guard_summary=guard_summary,
        ingredients=ingredients,
        ingredient_columns=columns,
        facts=pool_facts(run),
        command=shlex.join(str(word) for word in run.about.get("command") or []),
        recipe=run.record.recipe.strip(),
        environment=machine_facts(run),
        notes=_notes(run),
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
        "comparison": comparison(rows),
        "weights": weights_by_group(run, shown) if shown else None,
        "distribution": distribution(run),
        "pot": weights_by_method(run),
        "ingredients": score_against_weight(run, shown) if shown else None,
        "curves": curves(run),
        "distances": distances(run),
        "growth": growth(run),
        "cost": cost(rows) if len(rows) > 1 else None,
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
        notices.append(f"This run {word}: the report shows what is there so far. Run the command again to continue.")
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
        tiles.append(Tile(row.metric.value(row.score.value), f"{row.method} on {DATA[row.kind]}{n}{between}"))
    if row is not None and row.difference is not None:
        mean, low, high = row.difference
        tone = "good" if low > 0 else "bad" if high < 0 else ""
        unit = f" {row.metric.unit}" if row.metric.unit else ""
        between = f"{row.metric.change(low)} to {row.metric.change(high)}"
        tiles.append(Tile(f"{row.metric.change(mean)}{unit}", f"against the best single model (95 %: {between})", tone))
    if row is not None and run.names:
        what = "models to serve" if not row.servable else "model to serve"
        serve = len(run.names) if not row.servable else 1
        tiles.append(
            Tile(str(serve), f"{what}; {row.models_used} of {words.plural(len(run.names), 'ingredient')} used")
        )
    if row is not None and row.seconds is not None:
        tiles.append(Tile(words.seconds(row.seconds), f"to cook it, with {words.size(row.peak)} of memory at most"))
    return tiles


def _verdict(rows: list[Row]) -> str:
    """For runs that were stopped before they wrote their own."""
    scored = [row for row in rows if row.score is not None]
    if not scored:
        return "Nothing has been scored yet."
    best = max(scored, key=lambda row: row.score.value if row.score else -math.inf)
    score, between = best.cells()[1:3]
    return f"So far {best.method} scores highest: {score} on the {DATA[best.kind]} (95 % interval {between})."
