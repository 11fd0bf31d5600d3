"""The score against the number of ingredients in the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockpot.report.charts import canvas
from stockpot.report.charts.canvas import COLOURS, Picture, picture
from stockpot.report.record import Run, Score

if TYPE_CHECKING:
    from stockpot.report.charts.canvas import Figure

MARKERS = "osD^vPX"  # shapes too: colour alone must not carry the meaning


def growth(run: Run) -> Picture | None:
    lines: dict[str, list[tuple[int, Score]]] = {}
    for name, points in (run.results.get("growth") or {}).items():
        read = [
            (int(p["models"]), score) for p in points if (score := Score.read(p.get("report"))) is not None
        ]
        if read:
            lines[str(name)] = sorted(read, key=lambda point: point[0])
    if not lines or max(len(points) for points in lines.values()) < 2:
        return None
    metric = run.metric
    ends = ", ".join(
        f"{name} from {metric.value(points[0][1].mean)} with {points[0][0]} to"
        f" {metric.value(points[-1][1].mean)} with {points[-1][0]}"
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
        fig = canvas.figure(width, 320 if wide else 300)
        axes = fig.add_subplot()
        reach = max(n for points in lines.values() for n, _ in points)
        for i, (name, points) in enumerate(lines.items()):
            tint = COLOURS[f"cat{i % 7 + 1}"]
            shift = (i - (len(lines) - 1) / 2) * 0.006 * reach  # bars side by side, not on top of each other
            x = [n + shift for n, _ in points]
            y = [metric.scale * s.mean for _, s in points]
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
        canvas.whole_numbers(axes.xaxis, 10 if wide else 6)
        canvas.few_ticks(axes.yaxis, 6)
        axes.set_xlabel("number of ingredients")
        axes.set_ylabel(metric.axis)
        fig.legend(loc="outside upper left", ncols=4 if wide else 2, fontsize=10.5)
        return fig

    return picture("growth", alt, caption, paint)
