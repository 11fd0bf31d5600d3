"""Each ingredient's own score against its weight in the soup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stockpot.report import words
from stockpot.report.charts import canvas
from stockpot.report.charts.canvas import COLOURS, Picture, picture
from stockpot.report.record import Method, Numbers, Run

if TYPE_CHECKING:
    from stockpot.report.charts.canvas import Figure

NAMED = 4
ENOUGH = 6  # points, to speak of a correlation


def score_against_weight(run: Run, method: Method) -> Picture | None:
    weight = method.weight  # (K,)
    known = np.isfinite(run.own_scores)
    if weight is None or known.sum() < 2 or method.result.get("models_used") == 1:
        return None
    metric = run.metric
    score = metric.scale * run.own_scores
    K = len(weight)
    order: list[int] = sorted(np.flatnonzero(known).tolist(), key=lambda k: -float(weight[k]))
    named = list(dict.fromkeys([*order[:NAMED], order[-1], int(np.nanargmax(score))]))
    short = words.labels(run.names, 22)
    pearson = _correlation(score[known], weight[known])
    alt = (
        f"Own {metric.title} of {K} ingredients against their mean weight in the {method.name} soup;"
        f" the heaviest is {run.names[order[0]]} with {weight[order[0]]:.3f}."
    )

    def paint(width: int) -> Figure:
        wide = width > 500
        room = [(words.columns(name) * 6.2 + 10) / (width - 90) for name in short]
        fig = canvas.figure(width, 330 if wide else 290)
        axes = fig.add_subplot()
        negative = weight < 0
        for part, tint in ((~negative & known, "accent"), (negative & known, "outside")):
            axes.plot(
                score[part],
                weight[part],
                linestyle="none",
                marker="o",
                markersize=7,
                markerfacecolor=COLOURS[tint],
                markeredgecolor=COLOURS["card"],
                markeredgewidth=0.8,
                alpha=0.85,
            )
        axes.axhline(0, color=COLOURS["muted"], linewidth=0.8)
        axes.axhline(1 / K, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (4, 3)))
        axes.margins(x=0.06, y=0.12)
        for k, left in _apart(named, score, weight, room):
            axes.annotate(
                short[k],
                (score[k], weight[k]),
                xytext=(-8 if left else 8, 0),
                textcoords="offset points",
                ha="right" if left else "left",
                va="center",
                fontsize=10,
                color=COLOURS["fg"],
            )
        axes.annotate(
            "even mix",
            (0, 1 / K),
            xycoords=("axes fraction", "data"),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=9.5,
            color=COLOURS["muted"],
        )
        axes.grid(axis="both")
        canvas.few_ticks(axes.xaxis, 7 if wide else 4)
        axes.set_xlabel(f"own {metric.axis} on the fitting data" if wide else f"own {metric.axis}")
        axes.set_ylabel(f"mean weight in {method.name}")
        return fig

    return picture(
        "ingredients", alt, _caption(method, pearson, bool((weight < 0).any()), int(known.sum())), paint
    )


def _apart(named: list[int], score: Numbers, weight: Numbers, room: list[float]) -> list[tuple[int, bool]]:
    """The points whose names cover nothing else, and whether the name goes to the left of its point.

    `room` is how wide each name is, as a share of the axis. (K,)
    """
    x = (score - np.nanmin(score)) / (np.nanmax(score) - np.nanmin(score) or 1.0)  # (K,) from 0 to 1
    y = (weight - weight.min()) / (np.ptp(weight) or 1.0)
    placed: list[tuple[int, bool]] = []
    taken: list[tuple[float, float, float]] = [
        (x[k], x[k], y[k]) for k in range(len(x))
    ]  # from, to, at which height
    for k in named:
        others = [span for j, span in enumerate(taken) if j != k]
        for left in (True, False) if x[k] > 0.5 else (False, True):
            start, end = (x[k] - room[k], x[k]) if left else (x[k], x[k] + room[k])
            free = all(end < a or b < start or abs(y[k] - at) > 0.05 for a, b, at in others)
            if free and start > -0.05 and end < 1.05:
                placed.append((k, left))
                taken.append((start, end, y[k]))
                break
    return placed


def _correlation(x: Numbers, y: Numbers) -> float:
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def _caption(method: Method, correlation: float, negative: bool, points: int) -> str:
    text = (
        "One dot per ingredient: how good it is alone (right is better) and how much of it is in"
        f" {method.name} (up is more)."
    )
    if points >= ENOUGH:
        if correlation > 0.5:
            text += " Better ingredients got more weight here"
        elif correlation < -0.5:
            text += " Better ingredients got less weight here"
        else:
            text += " Being good alone says little about being useful in the soup here"
        text += f" (correlation {correlation:.2f})."
    if negative:
        text += " Orange ingredients have a negative weight on average: the soup moves away from them."
    return text.replace("-0.", "−0.")
