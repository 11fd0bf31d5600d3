"""Numbers and tables as they stand in docs/results.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stockpot.report import words


def percent(score: float | None) -> str:
    return "–" if score is None else f"{100 * score:.2f}"


def points(difference: float) -> str:
    """A size without a sign; fine enough that a limit and what is just above it do not look the same."""
    return f"{100 * difference:.3f}"


def change(difference: float) -> str:
    shown = f"{100 * difference:+.2f}"
    return (shown if float(shown) else "0.00").replace("-", "−")


def interval(value: Sequence[float] | None) -> str:
    """A difference in points with its 95 % interval."""
    if value is None:
        return "–"
    mean, low, high = (change(one) for one in value)
    return f"{mean} [{low}, {high}]"


def number(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else words.seconds(seconds)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def machine(run: Mapping[str, Any]) -> str:
    """Where and when a run was made."""
    found = run["machine"]
    alone = {None: "", 1: ", alone on it"}.get(run.get("jobs"), f", {run.get('jobs')} runs at once")
    memory = words.size(found["memory"]) if found.get("memory") else "unknown memory"
    return (
        f"{found['device']}; {found['cores']} cores of {found['cpu']}, {memory}{alone};"
        f" torch {found['torch']}, stockpot {run['stockpot']}; {run['created'][:10]}"
    )
