"""The mixing weights: of one soup by group, of all soups by ingredient, and how they are distributed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stockpot import words
from stockpot.report.charts import drawing, heatmap
from stockpot.report.charts.drawing import COLOURS, Picture, picture
from stockpot.report.reading import Method, Run

if TYPE_CHECKING:
    from stockpot.report.charts.drawing import Axes, Figure


TOP = 20  # pixels above the cells
TOLERANCE = 1e-9  # weights of 0 and 1 that went through arithmetic are not extrapolated


def outside(W: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which weights are extrapolated: below 0 or above 1."""
    return np.asarray((W < -TOLERANCE) | (W > 1 + TOLERANCE))


def weights_by_group(run: Run, method: Method) -> Picture | None:
    W = method.W
    if W is None or not W.size or W.shape[1] < 2:
        return None
    order = _heaviest(run.best_first, np.abs(W).max(axis=1))
    W = W[order]  # (K or fewer, G)
    names = [run.names[k] for k in order]
    limit = heatmap.nice(float(np.quantile(np.abs(W), 0.995)))
    extrapolated = outside(W)
    K, G = W.shape
    alt = (
        f"Mixing weights of the {method.name} soup: {K} ingredients by {G} groups of tensors,"
        f" from {W.min():.2f} to {W.max():.2f}; {words.share(extrapolated.mean())} are below 0 or above 1."
    )

    told: list[dict[str, Any]] = []  # of each width

    def paint(width: int) -> Figure:
        smallest = 5 if width > 500 else 4
        plan = heatmap.Grid.plan(width, names, G)
        bins = min(G, (width - plan.left - 2) // smallest)
        grid = heatmap.Grid.plan(width, names, bins)
        values, marked, starts = _binned(W, extrapolated, bins)
        place = {"left": grid.left, "top": TOP, "width": grid.cell_width, "height": grid.cell_height}
        numbers = [[round(float(value), 3) for value in row] for row in values]
        told.append({**place, "rows": names, "columns": [method.groups[g] for g in starts], "values": numbers})
        height = grid.height() + 66
        fig = drawing.figure(width, height, manual=True)
        axes = heatmap.cells(fig, grid, TOP, values, limit, marked)
        _parts(axes, grid, [method.groups[g] for g in starts])
        heatmap.legend(fig, grid, grid.height() + 34, W, limit)
        return fig

    made = picture("weights", alt, _group_caption(method, extrapolated) + _left_out(run, order), paint)
    return replace(made, cells=told[0])


def _heaviest(best_first: list[int], weight: NDArray[np.float64]) -> list[int]:
    """Those of the ingredients that matter most, where there are more than a chart has rows for; best first."""
    kept = set(np.argsort(-weight, kind="stable")[: heatmap.MOST].tolist())
    return [k for k in best_first if k in kept]


def _left_out(run: Run, shown: Sequence[int]) -> str:
    if len(shown) == len(run.names):
        return ""
    return f" Shown are the {len(shown)} ingredients with the largest weights, of {len(run.names)}."


def _binned(
    W: NDArray[np.float64], extrapolated: NDArray[np.bool_], bins: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_], list[int]]:
    """Neighbouring groups share a column when there are more than fit; a column keeps its largest weight."""
    G = W.shape[1]
    if bins >= G:
        return W, extrapolated, list(range(G))
    starts = [i * G // bins for i in range(bins)]
    parts = [W[:, a:b] for a, b in zip(starts, [*starts[1:], G], strict=True)]
    rows = np.arange(W.shape[0])
    values = np.stack([part[rows, np.abs(part).argmax(axis=1)] for part in parts], axis=1)
    return values, outside(values), starts


def _parts(axes: Axes, grid: heatmap.Grid, names: Sequence[str]) -> None:
    """Name the parts of the model above their columns, as far as there is room."""
    fits = all(words.columns(name) * 5.6 + 4 <= grid.cell_width for name in names)
    blocks = list(names) if fits else [block_name(name) for name in names]
    edges = [0, *(i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1]), len(blocks)]
    free = 0.0
    for a, b in itertools.pairwise(edges):
        start, end = a * grid.cell_width, b * grid.cell_width
        if a and end - start >= 12:
            axes.axvline(a, color=COLOURS["card"], linewidth=1.2)
        text = words.middle(blocks[a], 22)
        needed = words.columns(text) * 5.6 + 6
        if start >= free and start + needed <= len(blocks) * grid.cell_width:
            axes.annotate(
                text,
                (a, 0),
                xytext=(1, 4),
                textcoords="offset points",
                fontsize=9.5,
                color=COLOURS["muted"],
                annotation_clip=False,
            )
            free = max(end, start + needed) if end - start >= needed else start + needed + 24


def block_name(group: str) -> str:
    """`encoder.layer.3.attention.query` belongs to `layer.3`, `head.weight` to `head`."""
    parts = group.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[i - 1 : i + 1]) if i else f"part {part}"
    return parts[0]


def _group_caption(method: Method, extrapolated: NDArray[np.bool_]) -> str:
    assert method.W is not None
    K, G = method.W.shape
    parts = [
        f"The recipe of the {method.name} soup: one row per ingredient (best on top), one column per part of the model,"
        " from its input on the left to its output on the right. The stronger the blue, the more of it is in the soup;"
        f" an even mix would be {1 / K:.3g} everywhere."
    ]
    if extrapolated.any():
        parts.append(
            f"Orange is subtracted. {words.share(float(extrapolated.mean()))} of the {K * G:,} weights are extrapolated"
            " (below 0 or above 1); a dot marks them where cells are large enough."
        )
    else:
        parts.append("No weight is extrapolated (below 0 or above 1).")
    if G > 50:
        parts.append(
            f"Where there is no room for {G} columns, neighbours share one, which shows the largest of their weights."
        )
    return " ".join(parts)
