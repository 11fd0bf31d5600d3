"""Every method's score with its confidence interval, against the best single model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockpot.report.charts import canvas
from stockpot.report.charts.canvas import COLOURS, Picture, picture
from stockpot.report.rows import DATA, Row

if TYPE_CHECKING:
    from stockpot.report.charts.canvas import Figure


def comparison(rows: list[Row]) -> Picture | None:
    shown = [row for row in rows if row.score is not None]
    if not shown:
        return None
    metric = shown[0].metric
    best = max(shown, key=lambda row: row.score.mean if row.score else 0.0)
    data = DATA[shown[0].kind]
    alt = f"{metric.title} of {len(shown)} methods on the {data}; highest: {best.method} with {best.cells()[1]}."

    def paint(width: int) -> Figure:
        wide = width > 500
        fig = canvas.figure(width, 62 + 25 * len(shown))
        axes = fig.add_subplot()
        baseline = next((row.score.mean for row in shown if row.baseline and row.score), None)
        if baseline is not None and len(shown) > 1:
            axes.axvline(
                metric.scale * baseline, color=COLOURS["outside"], linewidth=1, linestyle=(0, (4, 3))
            )
        for y, row in enumerate(shown):
            assert row.score is not None
            mean, low, high = (metric.scale * v for v in (row.score.mean, row.score.low, row.score.high))
            colour = COLOURS["accent"] if row.recommended else COLOURS["muted"]
            hollow = not row.servable
            axes.plot([low, high], [y, y], color=colour, linewidth=3 if row.recommended else 1.8, alpha=0.55)
            axes.plot(
                [mean],
                [y],
                marker="o",
                markersize=9 if row.recommended else 7,
                markerfacecolor=COLOURS["card"] if hollow else colour,
                markeredgecolor=colour,
                markeredgewidth=1.6,
            )
            text = row.cells()[1]
            axes.annotate(
                text,
                (1, y),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=COLOURS["fg" if row.recommended else "muted"],
                fontweight="bold" if row.recommended else "normal",
            )
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_yticks(range(len(shown)), [row.method for row in shown])
        for label, row in zip(axes.get_yticklabels(), shown, strict=True):
            label.set_color(COLOURS["fg"])
            label.set_fontweight("bold" if row.recommended else "normal")
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        canvas.few_ticks(axes.xaxis, 8 if wide else 4)
        axes.set_xlabel(f"{metric.axis} on the {data}" if wide else metric.axis)
        return fig

    return picture("comparison", alt, _caption(shown, best), paint)


def _caption(rows: list[Row], best: Row) -> str:
    parts = ["Each dot is one method; its bar is the 95 % confidence interval of the score."]
    if any(row.baseline for row in rows) and len(rows) > 1:
        parts.append(
            "The dashed line is the best single model: dots to its right are better than what you had."
        )
    if any(row.recommended for row in rows) and len(rows) > 1:
        parts.append(
            "The recommended soup is the bold one; it was chosen without looking at the report data."
        )
        chosen = next(row for row in rows if row.recommended)
        if chosen is not best and best.score and chosen.score and chosen.score.mean < best.score.mean:
            parts.append(f"On this data {best.method} happens to score highest.")
    if any(not row.servable for row in rows):
        parts.append("The hollow dot is the ensemble: it runs every model at once, so it is no soup.")
    if any(row.score and row.score.n for row in rows) and len(rows) > 1:
        parts.append(
            "Overlapping bars do not mean that two methods are equal: the table compares them sample by sample."
        )
    return " ".join(parts)
