"""How far the ingredients are from each other in weight space, neighbours side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stockpot.report import words
from stockpot.report.charts import canvas, heatmap
from stockpot.report.charts.canvas import COLOURS, Picture, picture
from stockpot.report.record import Run

if TYPE_CHECKING:
    from stockpot.report.charts.canvas import Axes, Figure


def distances(run: Run) -> Picture | None:
    given = run.pool.get("distances")
    K = len(run.names)
    if not given or K < 2:
        return None
    pairs = np.array(given, dtype=np.float64)  # (K, K); null becomes NaN
    if pairs.shape != (K, K) or not np.isfinite(pairs).any():
        return None
    order = chain(pairs)
    pairs = pairs[np.ix_(order, order)]
    names = [run.names[k] for k in order]
    odd = None if (k := outlier(run)) is None else order.index(k)
    others = [i for i in range(K) if i != odd]  # an outlier must not make all other distances look the same
    limit = heatmap.nice(float(np.nanmax(pairs[np.ix_(others, others)])))
    alt = f"Pairwise distances of {K} ingredients, up to {np.nanmax(pairs):.3g}. {_outlier_sentence(run)}"
    caption = (
        "Distance between the weights of every two ingredients; the stronger the colour, the farther apart. Neighbours"
        " stand side by side, so groups of similar models appear as faint squares on the diagonal. "
        + _outlier_sentence(run)
        + _scale_sentence(run)
    )
    to_mean = np.array(run.pool.get("to_mean") or [], dtype=np.float64)  # (K,)
    missing = ~np.isfinite(pairs)
    if missing.any():
        caption += " Crosses are ingredients with weights that are not finite."

    def paint(width: int) -> Figure:
        grid = heatmap.Grid.plan(width, names, K, square=True)
        fig = canvas.figure(width, grid.height() + 62, manual=True)
        axes = heatmap.cells(fig, grid, 22, pairs, limit)
        y, x = np.nonzero(missing)
        axes.plot(x + 0.5, y + 0.5, linestyle="none", marker="x", markersize=4, color=COLOURS["outside"])
        side = grid.left + grid.cell_width * K + 24
        if to_mean.size == K and np.isfinite(to_mean).any() and width - side > 180:
            _to_mean(canvas.axes_at(fig, side, 22, width - side - 4, grid.height()), to_mean[order], odd)
        heatmap.legend(fig, grid, grid.height() + 32, pairs, limit)
        return fig

    return picture("distances", alt, caption, paint)


def _to_mean(axes: Axes, lengths: NDArray[np.float64], odd: int | None) -> None:
    """The same rows as bars: how far each ingredient is from the mean of all."""
    top = float(np.nanmax(lengths)) or 1.0
    for y, length in enumerate(np.nan_to_num(lengths)):
        tint = COLOURS["outside" if y == odd else "quiet"]
        canvas.patches(axes, [(0, y + 0.18, length / top, 0.64)], tint)
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
    canvas.bare(axes)
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


def outlier(run: Run) -> int | None:
    """The ingredient that stands apart, by the same rule as `stockpot inspect`."""
    given = run.pool.get("to_mean")
    if not given or len(given) != len(run.names):
        return None
    import torch

    from stockpot.run.distances import Distances

    to_mean = torch.tensor([np.nan if d is None else float(d) for d in given], dtype=torch.float64)
    nothing = torch.zeros(len(given), len(given))
    return Distances(nothing, to_mean, nothing[0]).outlier()


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
    k = outlier(run)
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
