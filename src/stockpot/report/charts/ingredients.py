"""The ingredients: how good each is alone against how much of it is used, and how far they are from each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stockpot.report import words
from stockpot.report.charts import drawing, heatmap
from stockpot.report.charts.drawing import COLOURS, Picture, picture
from stockpot.report.reading import Method, Numbers, Run

if TYPE_CHECKING:
    from stockpot.report.charts.drawing import Axes, Figure

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
        fig = drawing.figure(width, 330 if wide else 290)
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
        drawing.few_ticks(axes.xaxis, 7 if wide else 4)
        axes.set_xlabel(f"own {metric.axis} on the fitting data" if wide else f"own {metric.axis}")
        axes.set_ylabel(f"mean weight in {method.name}")
        return fig

    return picture(
        "ingredients", alt, _weight_caption(method, pearson, bool((weight < 0).any()), int(known.sum())), paint
    )


def _apart(named: list[int], score: Numbers, weight: Numbers, room: list[float]) -> list[tuple[int, bool]]:
    """The points whose names cover nothing else, and whether the name goes to the left of its point.

    `room` is how wide each name is, as a share of the axis. (K,)
    """
    x = (score - np.nanmin(score)) / (np.nanmax(score) - np.nanmin(score) or 1.0)  # (K,) from 0 to 1
    y = (weight - weight.min()) / (np.ptp(weight) or 1.0)
    placed: list[tuple[int, bool]] = []
    taken: list[tuple[float, float, float]] = [(x[k], x[k], y[k]) for k in range(len(x))]  # from, to, at which height
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


def _weight_caption(method: Method, correlation: float, negative: bool, points: int) -> str:
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


def distances(run: Run) -> Picture | None:
    given = run.pool.get("distances")
    K = len(run.names)
    if not given or K < 2:
        return None
    pairs = np.array(given, dtype=np.float64)  # (K, K); null becomes NaN
    if pairs.shape != (K, K) or not np.isfinite(pairs).any():
        return None
    order = chain(pairs)
    if K > heatmap.MOST:  # every so many-th of the chain, and its end, where an outlier stands
        order = [order[i] for i in np.linspace(0, K - 1, heatmap.MOST).round().astype(int)]
    shown = len(order)
    pairs = pairs[np.ix_(order, order)]
    names = [run.names[k] for k in order]
    odd = order.index(run.outlier) if run.outlier in order else None
    others = [i for i in range(shown) if i != odd]  # an outlier must not make all other distances look the same
    limit = heatmap.nice(float(np.nanmax(pairs[np.ix_(others, others)])))
    alt = f"Pairwise distances of {K} ingredients, up to {np.nanmax(pairs):.3g}. {_outlier_sentence(run)}"
    caption = (
        "Distance between the weights of every two ingredients; the stronger the colour, the farther apart. Neighbours"
        " stand side by side, so groups of similar models appear as faint squares on the diagonal. "
        + _outlier_sentence(run)
        + _scale_sentence(run)
    )
    to_mean = np.array(run.pool.get("to_mean") or [], dtype=np.float64)  # (K,)
    if shown < K:
        caption += f" Shown are {shown} of the {K} ingredients, spread evenly over all of them."
    missing = ~np.isfinite(pairs)
    if missing.any():
        caption += " Crosses are ingredients with weights that are not finite."

    def paint(width: int) -> Figure:
        grid = heatmap.Grid.plan(width, names, shown, square=True)
        fig = drawing.figure(width, grid.height() + 62, manual=True)
        axes = heatmap.cells(fig, grid, 22, pairs, limit)
        y, x = np.nonzero(missing)
        axes.plot(x + 0.5, y + 0.5, linestyle="none", marker="x", markersize=4, color=COLOURS["outside"])
        side = grid.left + grid.cell_width * shown + 24
        if to_mean.size == K and np.isfinite(to_mean).any() and width - side > 180:
            _to_mean(drawing.axes_at(fig, side, 22, width - side - 4, grid.height()), to_mean[order], odd)
        heatmap.legend(fig, grid, grid.height() + 32, pairs, limit)
        return fig

    return picture("distances", alt, caption, paint)


def _to_mean(axes: Axes, lengths: NDArray[np.float64], odd: int | None) -> None:
    """The same rows as bars: how far each ingredient is from the mean of all."""
    top = float(np.nanmax(lengths)) or 1.0
    for y, length in enumerate(np.nan_to_num(lengths)):
        tint = COLOURS["outside" if y == odd else "quiet"]
        drawing.patches(axes, [(0, y + 0.18, length / top, 0.64)], tint)
    longest = int(np.nanargmax(lengths))
    axes.annotate(
        f"{lengths[longest]:.3g}",
        (lengths[longest] / top, longest + 0.5),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=10,
    )
    axes.set_xlim(0, 1.22)
    axes.set_ylim(len(lengths), 0)
    drawing.bare(axes)
    axes.set_title("distance to the mean of all", fontsize=11, color=COLOURS["muted"])


def chain(pairs: NDArray[np.float64]) -> list[int]:
    """From the most central ingredient always on to the nearest one left: an outlier comes last."""
    far = np.where(np.isfinite(pairs), pairs, np.inf)
    order = [int(np.argmin(far.sum(axis=1)))]
    left = [k for k in range(len(pairs)) if k != order[0]]
    while left:
        order.append(min(left, key=lambda k: (far[order[-1], k], k)))
        left.remove(order[-1])
    return order


def _scale_sentence(run: Run) -> str:
    """Distances mean little without the length of what they lie between."""
    norms = [float(norm) for norm in run.pool.get("norms") or [] if norm is not None]
    to_mean = [float(d) for d in run.pool.get("to_mean") or [] if d is not None]
    if not norms or not to_mean or not (norm := float(np.median(norms))):
        return ""
    far = float(np.median(to_mean))
    return (
        f" For scale: the weights themselves have a norm of {norm:.3g}, and lie {far:.3g} from the mean,"
        f" {100 * far / norm:.2g} % of that (medians)."
    )


def _outlier_sentence(run: Run) -> str:
    k = run.outlier
    to_mean = [np.nan if d is None else float(d) for d in run.pool.get("to_mean") or []]
    if k is not None:
        name = words.middle(run.names[k], 60)
        if not np.isfinite(to_mean[k]):
            return f"{name} has weights that are not finite."
        ratio = to_mean[k] / float(np.nanmedian(to_mean))
        return f"The outlier is {name}: {ratio:.1f} times as far from the mean of all models as usual."
    if len(to_mean) > 2 and np.isfinite(to_mean).all():
        far = words.middle(run.names[int(np.argmax(to_mean))], 60)
        return f"No ingredient stands apart; the farthest from the mean of all models is {far}."
    return "With so few ingredients nothing can be called an outlier."
