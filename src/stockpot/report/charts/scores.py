"""How much better or worse each method is than the best single model, sample by sample, on every set of data."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from stockpot.report.charts import drawing
from stockpot.report.charts.drawing import COLOURS, Picture, picture
from stockpot.table import Row

if TYPE_CHECKING:
    from stockpot.report.charts.drawing import Axes, Figure


def comparison(rows: list[Row]) -> Picture | None:
    """One panel for each set; nothing without differences."""
    names = [name for name in (rows[0].sets if rows else ()) if any(row.sets[name].difference for row in rows)]
    if not names:
        return None
    shown = [row for row in rows if any(row.sets[name].difference for name in names)]
    metrics, several = {name: rows[0].sets[name].metric for name in names}, len(names) > 1
    alt = "; ".join(
        "{} {} ({} to {}) on {}".format(row.method, *map(metric.change, change), name)
        for name, metric in metrics.items()
        for row in shown
        if (change := row.sets[name].difference) is not None
    )
    caption = (
        "How much each method gains over the best single model (the line at zero), sample by sample, with its 95 %"
        " interval. An interval that does not touch the line is more than chance: green is better, red is worse."
    )
    if any(row.recommended for row in shown) and len(shown) > 1:
        caption += " The bold one is recommended; it was chosen without looking at this data."
    if any(not row.servable for row in shown):
        caption += " The hollow dot is the ensemble, which runs every model at once: it is no soup."

    titles = " and ".join(dict.fromkeys(metric.title for metric in metrics.values()))

    def paint(width: int) -> Figure:
        across = len(names) if width > 500 else 1
        down = -(-len(names) // across)
        fig = drawing.figure(width, down * (54 + 25 * len(shown) + 20 * several) + 10)
        grid = fig.subplots(down, across, squeeze=False, sharey=True)
        for axes, (name, metric) in zip(grid.flat, metrics.items(), strict=True):
            _panel(axes, shown, name)
            if several:
                axes.set_title("\n".join(textwrap.wrap(f"on {name}", 34)))
            axes.set_xlabel(f"{metric.points or 'difference in ' + metric.title} against the best single model")
            drawing.few_ticks(axes.xaxis, 8 if across == 1 and width > 500 else 4)
            if across > 1 or width < 500:
                axes.set_xlabel(metric.points or f"difference in {metric.title}")
        return fig

    return picture("comparison", f"Paired differences in {titles}: {alt}.", caption, paint)


def _panel(axes: Axes, rows: list[Row], name: str) -> None:
    axes.axvline(0, color=COLOURS["muted"], linewidth=1)
    for y, row in enumerate(rows):
        metric, change = row.sets[name].metric, row.sets[name].difference
        if change is None:
            continue
        mean, low, high = (metric.scale * end for end in change)
        colour = COLOURS["good" if low > 0 else "bad" if high < 0 else "muted"]
        axes.plot([low, high], [y, y], color=colour, linewidth=3 if row.chosen else 1.8, alpha=0.6)
        texts = map(metric.change, change)
        axes.plot(
            [mean],
            [y],
            marker="o",
            markersize=9 if row.chosen else 7,
            markerfacecolor=colour if row.servable else COLOURS["card"],
            markeredgecolor=colour,
            markeredgewidth=1.6,
            gid=drawing.HOVER + "{}: {} ({} to {})".format(row.method, *texts),
        )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [row.method for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=False):
        label.set_color(COLOURS["fg"])
        label.set_fontweight("bold" if row.chosen else "normal")
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
