"""Everything the report shows, worked out from a run; the template and the Markdown version only arrange it."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import shlex
from collections.abc import Mapping
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from stockpot import files, words
from stockpot.report.curves import comparison, curves
from stockpot.report.drawing import Picture
from stockpot.report.reading import (
    Run,
    changed_settings,
    common_kind,
    guard_decision,
    ingredient_table,
    machine_facts,
    pool_facts,
    rows_of,
    stands_apart,
)
from stockpot.report.weight_chart import weights_by_group
from stockpot.run.verdict import advised
from stockpot.soups.registry import METHODS
from stockpot.table import DATA, Row, as_markdown, set_headings
from stockpot.words import escaped


def page_of(run: Run) -> dict[str, Any]:
    """The report without its looks."""
    rows = rows_of(run)
    guard, guard_summary = guard_decision(run)
    decision, _, why = (run.results["verdict"] or _verdict(rows)).partition("\n")
    return {
        "title": run.about["title"] or run.path.name,
        "decision": decision,
        "why": why,
        "subtitle": _subtitle(run),
        "notices": _notices(run, rows),
        "tiles": _tiles(run, next((row for row in rows if row.chosen), None)),
        "keep": to_keep(run),
        **_soup(run),
        "rows": rows,
        "set_headings": set_headings(rows) if rows else (),
        "explained": {row.method: METHODS[row.method].summary for row in rows},
        "data": DATA[common_kind(run, run.chosen)],
        "pictures": _pictures(run, rows),
        "inside": f"{run.showpiece.name} " if run.showpiece and run.showpiece is not run.chosen else "",
        "guard": guard,
        "guard_summary": guard_summary,
        "ingredients": ingredient_table(run),
        "stands_apart": stands_apart(run),
        "facts": pool_facts(run),
        "command": shlex.join(run.about["command"]),
        "settings": changed_settings(run),
        "recipe": run.recipe.strip(),
        "environment": machine_facts(run),
        "notes": _notes(run),
        "version": run.about["stockpot"],
    }


def to_keep(run: Run) -> tuple[str, str] | None:
    """Name and place of the best single model, where the verdict does not say to use the soup."""
    place = run.best_alone
    if place is None or not run.ingredients or not run.results["verdict"] or advised(run.results["verdict"]):
        return None
    return run.names[place], str(run.ingredients[place]["path"])


def _soup(run: Run) -> dict[str, str]:
    """Where the saved soup is in the run directory, and the lines that load it; empty without one."""
    if run.soup is None:
        return {"soup": "", "loading": ""}
    from stockpot.soup.card import loading  # with torch

    place = run.soup.relative_to(run.path).as_posix()
    return {"soup": place, "loading": "\n".join(loading(run.soup, place))}


def _notes(run: Run) -> list[tuple[str, str]]:
    """Each note with its method; what holds for all of them once."""
    several = len(run.methods) > 1
    shared = [n for n in run.methods[0].notes if all(n in m.notes for m in run.methods)] if several else []
    own = [(m.name, note) for m in run.methods for note in m.notes if note not in shared]
    absent = [(name, f"not in the table: {why}") for name, why in run.results["absent"].items()]
    return [("every method", note) for note in shared] + own + absent


def _pictures(run: Run, rows: list[Row]) -> dict[str, Picture]:
    shown = run.showpiece
    found = {
        "comparison": comparison(rows),
        "weights": weights_by_group(run, shown) if shown else None,
        "curves": curves(run),
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
    tiles = []
    for name, cell in row.sets.items():
        m, score, change, data = cell.metric, cell.score, cell.difference, name if len(row.sets) > 1 else DATA[row.kind]
        if score is not None and (change is None or cell is row.first):
            between = f" (95 %: {m.bare(score.low)} to {m.bare(score.high)})"
            if m.unit == "nats" and -score.value < 700:
                between += f", a perplexity of {math.exp(-score.value):.4g}"
            tiles.append((m.value(score.value), f"{row.method} on {data}, {score.n:,} examples{between}", ""))
        if change is not None:
            what = f"on {data} against the best single model (95 %: {m.change(change[1])} to {m.change(change[2])})"
            tiles.append((f"{m.change(change[0])} {m.points}".strip(), what, cell.tone))
    serve, what = (1, "model to serve") if row.servable else (len(run.names), "models to serve")
    tiles.append((str(serve), f"{what}; {row.models_used} of {words.plural(len(run.names), 'ingredient')} used", ""))
    return [*tiles, (words.seconds(row.seconds), f"to cook it, with {words.size(row.peak)} of memory at most", "")]


def _verdict(rows: list[Row]) -> str:
    """For runs that were stopped before they wrote their own."""
    scored = [(row.first.score.value, row) for row in rows if row.first.score is not None]
    if not scored:
        return "Nothing has been scored yet."
    best = max(scored, key=lambda pair: pair[0])[1]
    score, between = best.cells()[1:3]
    return f"So far {best.method} scores highest: {score} on the {DATA[best.kind]} (95 % interval {between})."


HTML, MARKDOWN = "report.html", "report.md"


def write_report(run_dir: Path) -> Path:
    """report.html and report.md from the record alone; the same record gives the same bytes. The soup's card gets the
    table of scores."""
    page = page_of(Run(run_dir))
    files.write_bytes(run_dir / MARKDOWN, markdown(page).encode(), root=run_dir)
    files.write_bytes(run_dir / HTML, html(page).encode(), root=run_dir)
    if page["soup"] and page["rows"]:
        from stockpot.soup.card import add_results  # with torch

        add_results(run_dir / page["soup"], "\n".join(as_markdown(page["rows"])), root=run_dir)
    return run_dir / HTML


def html(page: Mapping[str, Any]) -> str:
    """Everything is escaped except the charts, which are made of escaped text already."""
    from stockpot.adapters.code import need  # with torch

    jinja2 = need("jinja2")
    css, script, page_text = (_template(name) for name in ("report.css", "report.js", "report.html.j2"))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text: str = environment.from_string(page_text).render(page=page, css=css, script=script, digest=digest)
    return text + "\n"


def _template(name: str) -> str:
    return (package_files("stockpot.report") / "templates" / name).read_text("utf-8")


def markdown(page: Mapping[str, Any]) -> str:
    lines = [f"# {escaped(page['decision'])}", "", f"{escaped(page['title'])} · {escaped(page['subtitle'])}", ""]
    lines += [f"> {escaped(notice)}\n" for notice in page["notices"]]
    lines += [escaped(page["why"]), ""] if page["why"] else []
    if page["keep"]:
        lines += ["{}, the best single model, is {}.".format(*map(escaped, page["keep"])), ""]
    if page["soup"]:
        lines += [f"The soup is in {escaped(page['soup'])}, in this directory. To load it:", ""]
        lines += [_fenced(page["loading"], "python"), ""]
    lines += [*as_markdown(page["rows"]), ""] if page["rows"] else []
    lines += [*(f"- {escaped(name)}: {escaped(note)}" for name, note in page["notes"]), ""] if page["notes"] else []
    if page["guard_summary"]:
        lines += [escaped(page["guard_summary"]), ""]
    if page["command"]:
        lines += ["To get this again:", "", _fenced(page["command"], "sh"), ""]
    return "\n".join([*lines, f"Made by stockpot {escaped(page['version'])}.", ""])


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
