"""What the methods reached and what they cost: scores, time and memory, and scores as the pool grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockpot.report.charts import drawing
from stockpot.report.charts.drawing import COLOURS, Picture, picture
from stockpot.report.reading import Run, Score
from stockpot.report.tables import DATA, Row

if TYPE_CHECKING:
    from stockpot.report.charts.drawing import Figure


def comparison(rows: list[Row]) -> Picture | None:
    shown = [row for row in rows if row.score is not None]
    if not shown:
        return None
    metric = shown[0].metric
    best = max(shown, key=lambda row: row.score.value if row.score else 0.0)
    data = DATA[shown[0].kind]
    alt = f"{metric.title} of {len(shown)} methods on the {data}; highest: {best.method} with {best.cells()[1]}."

    def paint(width: int) -> Figure:
        wide = width > 500
        fig = drawing.figure(width, 62 + 25 * len(shown))
        axes = fig.add_subplot()
        baseline = next((row.score.value for row in shown if row.baseline and row.score), None)
        if baseline is not None and len(shown) > 1:
            axes.axvline(metric.scale * baseline, color=COLOURS["outside"], linewidth=1, linestyle=(0, (4, 3)))
        for y, row in enumerate(shown):
            assert row.score is not None
            mean, low, high = (metric.scale * v for v in (row.score.value, row.score.low, row.score.high))
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
        drawing.few_ticks(axes.xaxis, 8 if wide else 4)
        axes.set_xlabel(f"{metric.axis} on the {data}" if wide else metric.axis)
        return fig

    return picture("comparison", alt, _comparison_caption(shown, best), paint)


def _comparison_caption(rows: list[Row], best: Row) -> str:
    parts = ["Each dot is one method; its bar is the 95 % confidence interval of the score."]
    if any(row.baseline for row in rows) and len(rows) > 1:
        parts.append("The dashed line is the best single model: dots to its right are better than what you had.")
    if any(row.recommended for row in rows) and len(rows) > 1:
        parts.append("The recommended soup is the bold one; it was chosen without looking at the report data.")
        chosen = next(row for row in rows if row.recommended)
        if chosen is not best and best.score and chosen.score and chosen.score.value < best.score.value:
            parts.append(f"On this data {best.method} happens to score highest.")
    if any(not row.servable for row in rows):
        parts.append("The hollow dot is the ensemble: it runs every model at once, so it is no soup.")
    if any(row.score and row.score.n for row in rows) and len(rows) > 1:
        parts.append(
            "Overlapping bars do not mean that two methods are equal: the table compares them sample by sample."
        )
    return " ".join(parts)


MARKERS = "osD^vPX"  # shapes too: colour alone must not carry the meaning


def growth(run: Run) -> Picture | None:
    lines: dict[str, list[tuple[int, Score]]] = {}
    for name, points in (run.results.get("growth") or {}).items():
        read = [(int(p["models"]), score) for p in points if (score := Score.read(p.get("report"))) is not None]
        if read:
            lines[str(name)] = sorted(read, key=lambda point: point[0])
    if not lines or max(len(points) for points in lines.values()) < 2:
        return None
    metric = run.metric
    ends = ", ".join(
        f"{name} from {metric.value(points[0][1].value)} with {points[0][0]} to"
        f" {metric.value(points[-1][1].value)} with {points[-1][0]}"
        for name, points in lines.items()
    )
    alt = f"{metric.title} against the number of ingredients: {ends}."
    caption = (
        "The same methods on the first few ingredients, then on more and more of them. A line that still rises at"
        " the right says that fine-tuning more models would probably help; a flat one says that the pool is"
        " large enough."
    )
    if any(score.high > score.low for points in lines.values() for _, score in points):
        caption += " Bars are 95 % confidence intervals."

    def paint(width: int) -> Figure:
        wide = width > 500
        fig = drawing.figure(width, 320 if wide else 300)
        axes = fig.add_subplot()
        reach = max(n for points in lines.values() for n, _ in points)
        for i, (name, points) in enumerate(lines.items()):
            tint = COLOURS[f"cat{i % 7 + 1}"]
            shift = (i - (len(lines) - 1) / 2) * 0.006 * reach  # bars side by side, not on top of each other
            x = [n + shift for n, _ in points]
            y = [metric.scale * s.value for _, s in points]
            axes.vlines(
                x,
                [metric.scale * s.low for _, s in points],
                [metric.scale * s.high for _, s in points],
                color=tint,
                linewidth=1.4,
                alpha=0.45,
            )
            chosen = run.recommended is not None and run.recommended.name == name
            axes.plot(
                x,
                y,
                color=tint,
                marker=MARKERS[i % len(MARKERS)],
                markersize=5.5,
                linewidth=2.4 if chosen else 1.4,
                label=f"{name} (recommended)" if chosen and wide else name,
            )
        axes.grid(axis="y")
        drawing.whole_numbers(axes.xaxis, 10 if wide else 6)
        drawing.few_ticks(axes.yaxis, 6)
        axes.set_xlabel("number of ingredients")
        axes.set_ylabel(metric.axis)
        fig.legend(loc="outside upper left", ncols=4 if wide else 2, fontsize=10.5)
        return fig

    return picture("growth", alt, caption, paint)
