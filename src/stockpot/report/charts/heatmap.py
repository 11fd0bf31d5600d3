"""A matrix as coloured cells, in steps of colour that the page defines.

Cells lie on whole pixels and each step of colour is one path, so 72 x 140 cells are a few hundred kilobytes at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stockpot.report.charts import drawing
from stockpot.report.charts.drawing import COLOURS, LEVELS
from stockpot.words import columns, labels

if TYPE_CHECKING:
    from stockpot.report.charts.drawing import Axes, Figure

MOST = 72  # rows: of more ingredients a chart shows some, and its caption says which
DOT = 7  # pixels; smaller cells have no room for a mark


@dataclass(frozen=True)
class Grid:
    """Where the cells of a heatmap are, in pixels."""

    width: int
    rows: list[str]
    cell_width: int
    cell_height: int
    font: float
    left: int

    @staticmethod
    def plan(width: int, names: Sequence[str], cells: int) -> Grid:
        wide = width > 500
        rows = labels(names, 26 if wide else 14)
        height = max(9, min(20, 640 // max(1, len(names))))
        font = min(11.0, height - 1.0) if wide else min(10.0, height - 1.0)
        left = int(max(columns(row) for row in rows) * font * 0.62) + 10
        room = (width - left - 2) // max(1, cells)
        return Grid(width, rows, max(2, min(room, 72)), height, font, left)

    def height(self) -> int:
        return self.cell_height * len(self.rows)


def levels(values: NDArray[np.float64], limit: float) -> NDArray[np.int64]:
    """-LEVELS to LEVELS; a negative value is never shown as zero or above, nor the other way round."""
    steps = np.nan_to_num(values) / limit * LEVELS
    whole = np.clip(np.ceil(np.abs(steps) - 0.5), 0, LEVELS)
    whole = np.where((values < 0) & (whole == 0), 1, whole)
    return np.asarray(np.where(values < 0, -whole, whole), dtype=np.int64)


def colour(level: int) -> str:
    return COLOURS["zero" if level == 0 else f"p{level}" if level > 0 else f"n{-level}"]


def cells(
    fig: Figure,
    grid: Grid,
    top: int,
    values: NDArray[np.float64],  # (rows, columns)
    limit: float,
    marked: NDArray[np.bool_] | None = None,
) -> Axes:
    """Draw the cells with their row labels; the axes count in cells, downwards."""
    height, width = values.shape
    axes = drawing.axes_at(fig, grid.left, top, grid.cell_width * width, grid.cell_height * height)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    drawing.bare(axes)
    axes.set_yticks(np.arange(height) + 0.5, grid.rows, fontsize=grid.font, color=COLOURS["fg"])
    found = levels(values, limit)
    for level in np.unique(found):
        drawing.patches(axes, _runs(found == level), colour(int(level)))
    if marked is not None and min(grid.cell_width, grid.cell_height) >= DOT:
        for strong in (False, True):  # on strong colours the mark takes the page's colour
            y, x = np.nonzero(marked & ((np.abs(found) > LEVELS // 2) == strong))
            axes.plot(
                x + 0.5,
                y + 0.5,
                linestyle="none",
                marker="o",
                markersize=2.2,
                markeredgewidth=0,
                color=COLOURS["card" if strong else "fg"],
            )
    return axes


def legend(fig: Figure, grid: Grid, top: int, values: NDArray[np.float64], limit: float) -> None:
    """The colour scale as a row of swatches, without the negative half where nothing is negative."""
    first = -LEVELS if (values < 0).any() else 0
    low = f"≤ −{limit:g}" if np.nanmin(values) < -limit else f"−{limit:g}"
    high = f"≥ {limit:g}" if np.nanmax(values) > limit else f"{limit:g}"
    steps = list(range(first, LEVELS + 1))
    side = 12
    axes = drawing.axes_at(fig, grid.left, top, side * len(steps), 10)
    axes.set_xlim(0, len(steps))
    axes.set_ylim(1, 0)
    drawing.bare(axes)
    for i, step in enumerate(steps):
        drawing.patches(axes, [(i, 0, 1, 1)], colour(step))
    names = {first: low, 0: "0", LEVELS: high}
    ticks = {steps.index(step) + 0.5: text for step, text in names.items()}
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=10, color=COLOURS["muted"])


def nice(limit: float) -> float:
    """The next round number, for the end of a colour scale."""
    if not np.isfinite(limit) or limit <= 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(limit))
    return float(next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= limit * 0.999))


def _runs(mask: NDArray[np.bool_]) -> list[tuple[float, float, float, float]]:
    """Neighbouring cells of a row become one rectangle."""
    found: list[tuple[float, float, float, float]] = []
    for y, row in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
        found += [(float(a), float(y), float(b - a), 1.0) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return found
