"""What was tried out on the dev split: one line each, compared sample by sample with one of them."""

from __future__ import annotations

from pathlib import Path

from stockpot.errors import RunError, describe
from stockpot.report.record import Method, Run, read
from studies import intervals, steps
from studies.markdown import interval, percent

HEADINGS = ("try", "method", "dev", "held out", "fit", "steps", "seconds", "minus {}")


def rows(runs: Path, against: str | None = None) -> list[list[str]]:
    """Best first. `against` is a try's name; the oldest by default."""
    found = {
        path.parent.name.removeprefix("try-"): read(path.parent)
        for path in sorted(runs.glob("try-*/run.json"))
    }
    done = {name: run for name, run in found.items() if run.about.get("status") == "done"}
    if not done:
        return []
    base = against or min(done, key=lambda name: str(done[name].about["created"]))
    if base not in done:
        raise RunError(
            describe(
                f"--against {base}",
                expected=f"a finished try: {', '.join(done)}",
                found="none of that name",
                fix="choose one of these",
            )
        )
    lines = [
        (_score(method), _row(name, run, method, done[base]))
        for name, run in done.items()
        for method in run.methods
    ]
    lines.sort(key=lambda pair: -pair[0])
    return [[*HEADINGS[:-1], HEADINGS[-1].format(base)], *(row for _, row in lines)]


def _row(name: str, run: Run, method: Method, base: Run) -> list[str]:
    counted = steps.counted(run.path / "events.jsonl").get(method.name, 0)
    result = method.result
    held_out = result["held_out"]
    return [
        name,
        method.name,
        percent(_score(method)),
        percent(None if held_out is None else held_out["mean"]),
        percent(result["fit"]["mean"]),
        f"{counted:,}",
        f"{result['seconds']:.1f}",
        _difference(method, base),
    ]


def _difference(method: Method, base: Run) -> str:
    """Against the same method there, or against its only one."""
    other = base.method(method.name) or (base.methods[0] if len(base.methods) == 1 else None)
    if other is None or other.result is method.result:
        return "–"
    one, two = method.values.get("report"), other.values.get("report")
    if one is None or two is None or one.shape != two.shape:
        return "–"
    return interval(intervals.over_samples(one - two))


def _score(method: Method) -> float:
    report = method.result["report"]
    return float("-inf") if report is None else float(report["mean"])
