"""What each method cost: seconds and peak memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockpot.report import words
from stockpot.report.charts import canvas
from stockpot.report.charts.canvas import COLOURS, Picture, picture
from stockpot.report.rows import Row

if TYPE_CHECKING:
    from stockpot.report.charts.canvas import Axes, Figure


def cost(rows: list[Row]) -> Picture | None:
    if not rows or all(row.seconds is None for row in rows):
        return None
    device = any(row.peak_device for row in rows)
    slowest = max(rows, key=lambda row: row.seconds or 0)
    alt = f"Seconds and peak memory of {len(rows)} methods; the slowest is {slowest.method}: {slowest.cells()[4]}."
    where = (
        "of the accelerator"
        if device
        else "of the process, without the checkpoint files the system keeps cached"
    )
    caption = (
        f"Wall-clock time to find the mixing weights, and the peak memory {where}."
        " Scoring the ingredients is counted for every method that needs it."
        " Serving a soup costs the same as serving one model, whatever it took to cook."
    )
    panels = [("time", [row.seconds or 0.0 for row in rows], [words.seconds(row.seconds) for row in rows])]
    memory = [float(row.peak_device if device else row.peak_host) for row in rows]
    if any(memory):
        panels.append(("peak memory", memory, [words.size(value) for value in memory]))

    def paint(width: int) -> Figure:
        wide = width > 500
        across = len(panels) if wide else 1
        down = len(panels) // across
        fig = canvas.figure(width, down * (34 + 23 * len(rows)))
        grid = fig.subplots(down, across, squeeze=False, sharey=wide)
        for axes, (title, values, texts) in zip(grid.flat, panels, strict=True):
            _bars(axes, rows, title, values, texts)
        return fig

    return picture("cost", alt, caption, paint)


def _bars(axes: Axes, rows: list[Row], title: str, values: list[float], texts: list[str]) -> None:
    top = max(values) or 1.0
    for y, (row, value, text) in enumerate(zip(rows, values, texts, strict=True)):
        canvas.patches(
            axes, [(0, y - 0.32, value / top, 0.64)], COLOURS["accent" if row.recommended else "quiet"]
        )
        axes.annotate(
            text,
            (value / top, y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS["fg"],
        )
    axes.set_xlim(0, 1.32)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xticks([])
    axes.set_yticks(range(len(rows)), [row.method for row in rows], color=COLOURS["fg"])
    axes.spines["bottom"].set_visible(False)
    axes.set_title(title, color=COLOURS["muted"])
