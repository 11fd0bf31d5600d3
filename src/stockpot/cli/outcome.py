"""How a run ends: the table, the verdict, where things are, and what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stockpot.cli.terminal import document, note, say, shown, table
from stockpot.report import words

if TYPE_CHECKING:
    from stockpot.report import Row


def end(run: Path, recipe: Path, as_json: bool, *, changed: bool = False) -> None:
    """After `cook` and `compare`; `changed`: what ran is not the recipe as it stands in its file."""
    from stockpot.report import write_report

    report = write_report(run)
    if as_json:
        document(summary(run, report))
        return
    show(run, report)
    soup = _soup(run, _results(run)["recommended"])
    if soup is not None:
        say("Next:")
        same = shown(run / "recipe.yaml") if changed else str(recipe)
        say(f"  stockpot evaluate {shlex.quote(shown(soup))} {shlex.quote(same)}")
        say(f"  stockpot rebuild {shlex.quote(shown(run))}    # the same soup again, from its record")


def _results(run: Path) -> dict[str, Any]:
    """What the finished run says of itself: recommended, verdict, failed."""
    from stockpot.run.directory import RESULTS, RunDirectory

    results: dict[str, Any] = RunDirectory.open(run).read_json(RESULTS)
    return results


def _soup(run: Path, method: str | None) -> Path | None:
    """The saved soup of a method; None for the ensemble, which is none, and where nothing is recommended."""
    from stockpot.run.directory import METHODS, slug

    path = run / METHODS / slug(method) / "soup" if method is not None else None
    return path if path is not None and path.is_dir() else None


def show(run: Path, report: Path) -> None:
    results = _results(run)
    recommended = results["recommended"]
    print_table(run)
    say(results["verdict"])
    for name, why in results["failed"].items():
        note(f"{name} failed: {why}")
    say()
    soup = _soup(run, recommended)
    if recommended is None:
        quoted = shlex.quote(shown(run))
        say("Soup:   none is recommended, because no method was judged on data that it was not fitted on.")
        say(f"        Write one with: stockpot rebuild {quoted} --method NAME")
    elif soup is not None:
        say(f"Soup:   {shown(soup)}  (recommended: {recommended})")
    say(f"Report: {shown(report)}")


def print_table(run: Path) -> None:
    from stockpot.report import summary_rows

    rows = summary_rows(run)
    say()
    if rows:
        marked = next((i for i, row in enumerate(rows) if row.recommended), None)
        metric = rows[0].metric.title
        headings = ("method", metric, "95 % CI", "vs. best single", "time", "memory", "models")
        table(headings, [_cells(row) for row in rows], marked=marked)
    say()


def _cells(row: Row) -> tuple[str, ...]:
    """Narrower than the report's, so that the table fits 80 columns."""
    percent = row.metric.scale == 100

    def short(value: float, sign: str = "") -> str:
        return f"{100 * value:{sign}.1f}" if percent else f"{value:{sign}.3g}"

    score, difference = row.score, row.difference
    return (
        row.method,
        "-" if score is None else row.metric.value(score.value),
        "-" if score is None else f"{short(score.low)}–{short(score.high)}",
        "-"
        if difference is None
        else f"{short(difference[0], '+')} ({short(difference[1], '+')} to {short(difference[2], '+')})",
        words.seconds(row.seconds),
        words.size(row.peak),
        str(row.models_used),
    )


def summary(run: Path, report: Path) -> dict[str, Any]:
    """The same for programs."""
    from stockpot.report import summary_rows

    results = _results(run)
    soup = _soup(run, results["recommended"])
    return {
        "run": str(run),
        "report": str(report),
        "soup": None if soup is None else str(soup),
        "recommended": results["recommended"],
        "verdict": results["verdict"],
        "failed": dict(results["failed"]),
        "methods": [
            {
                "method": row.method,
                "data": row.kind,
                "score": None
                if row.score is None
                else {key: getattr(row.score, key) for key in ("value", "low", "high", "n", "loss")},
                "difference": row.difference,
                "seconds": row.seconds,
                "peak_host": row.peak_host,
                "peak_device": row.peak_device,
                "models_used": row.models_used,
            }
            for row in summary_rows(run)
        ],
    }
