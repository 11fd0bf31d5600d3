"""How a run ends: the table, the verdict, where things are, and what to do next."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stockpot.cli.shell import document, note, say, shown, table
from stockpot.report import words

if TYPE_CHECKING:
    from stockpot.report import Row
    from stockpot.run import Outcome


def end(outcome: Outcome, recipe: Path, as_json: bool, *, changed: bool = False) -> None:
    """After `cook` and `compare`; `changed`: what ran is not the recipe as it stands in its file."""
    report = written_report(outcome.path)
    if as_json:
        document(summary(outcome, report))
        return
    show(outcome, report)
    if outcome.soup is not None:
        from stockpot.run.directory import RECIPE

        say("Next:")
        same = shown(outcome.path / RECIPE) if changed else str(recipe)
        say(f"  stockpot evaluate {shlex.quote(shown(outcome.soup))} {shlex.quote(same)}")
        say(
            f"  stockpot rebuild {shlex.quote(shown(outcome.path))}    # the same soup again, from its record"
        )


def show(outcome: Outcome, report: Path) -> None:
    print_table(outcome.path)
    say(outcome.verdict)
    for name, why in outcome.failed.items():
        note(f"{name} failed: {why}")
    say()
    if outcome.soup is not None:
        say(f"Soup:   {shown(outcome.soup)}  (recommended: {outcome.recommended})")
    say(f"Report: {shown(report)}")


def print_table(run: Path) -> None:
    from stockpot.report import summary_rows

    rows = summary_rows(run)
    say()
    if rows:
        marked = next((i for i, row in enumerate(rows) if row.recommended), None)
        headings = (
            "method",
            rows[0].metric.title,
            "95 % CI",
            "vs. best single",
            "time",
            "memory",
            "models",
        )
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
        "-" if score is None else row.metric.value(score.mean),
        "-" if score is None else f"{short(score.low)}–{short(score.high)}",
        "-"
        if difference is None
        else f"{short(difference[0], '+')} ({short(difference[1], '+')} to {short(difference[2], '+')})",
        words.seconds(row.seconds),
        words.size(row.peak),
        str(row.models_used),
    )


def written_report(run: Path) -> Path:
    from stockpot.report import write_report

    return write_report(run)


def summary(outcome: Outcome, report: Path) -> dict[str, Any]:
    from stockpot.report import summary_rows

    return {
        "run": str(outcome.path),
        "report": str(report),
        "soup": None if outcome.soup is None else str(outcome.soup),
        "recommended": outcome.recommended,
        "verdict": outcome.verdict,
        "failed": dict(outcome.failed),
        "methods": [
            {
                "method": row.method,
                "data": row.kind,
                "score": None if row.score is None else dataclasses.asdict(row.score),
                "difference": row.difference,
                "seconds": row.seconds,
                "peak_host": row.peak_host,
                "peak_device": row.peak_device,
                "models_used": row.models_used,
            }
            for row in summary_rows(outcome.path)
        ],
    }
