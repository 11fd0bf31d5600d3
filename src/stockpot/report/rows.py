"""The table of a run: one row per method, for the report, the README and the terminal alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stockpot.report import words
from stockpot.report.record import KINDS, Method, Run, Score, read

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
            "–" if score is None else self.metric.value(score.mean),
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
        _difference(method, run.baseline, kind),
        result.get("seconds"),
        int(result.get("peak_host") or 0),
        int(result.get("peak_device") or 0),
        int(result.get("models_used") or 0),
        recommended=method is run.recommended,
        baseline=method is run.baseline,
        servable=method.name != "ensemble",
    )


def _difference(method: Method, baseline: Method | None, kind: str) -> tuple[float, float, float] | None:
    if baseline is None or method is baseline:
        return None
    mine, other = method.values.get(kind), baseline.values.get(kind)
    if mine is None or other is None or mine.shape != other.shape or not mine.size:
        return None
    import torch

    from stockpot.run.scores import decode

    mine_scores, other_scores = (
        decode(m.result[kind], torch.from_numpy(np.ascontiguousarray(values)))
        for m, values in ((method, mine), (baseline, other))
    )
    return mine_scores.difference(other_scores)


def _change(metric: words.Metric, mean: float, low: float, high: float) -> str:
    return f"{metric.change(mean)} ({metric.change(low)} to {metric.change(high)})"
