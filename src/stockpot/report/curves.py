"""Two charts: what each method gains over the best single model, and the losses while mixing weights were learned."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stockpot.report.drawing import LETTER, Axes, Canvas, Picture, number, picture, ticks
from stockpot.report.reading import Run
from stockpot.table import Row

# ---- how much better or worse than the best single model, sample by sample, on every set of data


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

    def paint(width: int) -> Canvas:
        wide, left = width > 500, 14 + max(len(row.method) for row in shown) * LETTER * 12.5
        across = len(names) if wide else 1
        room, high = (width - left) / across, 25 * len(shown)
        title = {name: textwrap.wrap(f"on {name}", 34) if several else [] for name in names}
        above = 8 + 15 * max(map(len, title.values()))
        canvas = Canvas(width, -(-len(names) // across) * (above + high + 44))
        for at, (name, metric) in enumerate(metrics.items()):
            x, top = left + (at % across) * room, above + (at // across) * (above + high + 44)
            for n, text in enumerate(reversed(title[name])):
                canvas.text(x, top - 8 - 15 * n, text, colour="fg")
            _differences(canvas, shown, name, (x, top, room - 16, high), named=at % across == 0)
            unit = metric.points or f"difference in {metric.title}"
            unit += " against the best single model" if wide and across == 1 else ""
            canvas.text(x + (room - 16) / 2, top + high + 32, unit, "middle")
        return canvas

    return picture(f"Paired differences in {titles}: {alt}.", caption, paint)


def _differences(
    canvas: Canvas, rows: list[Row], name: str, place: tuple[float, float, float, float], named: bool
) -> None:
    metric = rows[0].sets[name].metric
    ends = [metric.scale * end for row in rows for end in row.sets[name].difference or (0.0,)]
    margin = 0.05 * (max(0, *ends) - min(0, *ends)) or 1.0
    axes = Axes(canvas, *place, (min(0, *ends) - margin, max(0, *ends) + margin), (len(rows) - 0.5, -0.5))
    axes.ticks_below(8 if place[2] > 400 else 4, grid=True)
    canvas.line([(axes.x(0), axes.top), (axes.x(0), axes.top + axes.height)], "muted")
    for n, row in enumerate(rows):
        y, change = axes.y(n), row.sets[name].difference
        if named:
            weight = "bold" if row.chosen else "normal"
            canvas.text(axes.left - 8, y + 4, row.method, "end", "fg", font_weight=weight)
        if change is None:
            continue
        mean, low, high = (axes.x(metric.scale * end) for end in change)
        colour = row.sets[name].tone or "muted"
        canvas.line([(low, y), (high, y)], colour, 3 if row.chosen else 1.8, opacity=0.6)
        said = "{}: {} ({} to {})".format(row.method, *map(metric.change, change))
        fill = colour if row.servable else "card"
        canvas.dot(mean, y, 4.5 if row.chosen else 3.5, fill, colour, said=said)


# ---- fit and held-out loss while the mixing weights were learned


@dataclass(frozen=True, eq=False)
class Line:
    """One fold's losses over all blocks, on one axis of steps."""

    x: NDArray[np.float64]
    loss: NDArray[np.float64]  # NaN where it was not finite


@dataclass(frozen=True)
class Panel:
    """One method's lines, and where its blocks begin and end."""

    fit: list[Line]
    held_out: list[Line]
    ends: list[float]

    @property
    def lines(self) -> list[Line]:
        return [*self.fit, *self.held_out]


def curves(run: Run) -> Picture | None:
    found = {}
    for method in run.methods:
        given = method.result["curves"]
        ends = _block_ends([*given["fit"], *given["held_out"]])
        panel = Panel(_lines(given["fit"], ends), _lines(given["held_out"], ends), ends)
        if any(np.isfinite(line.loss).any() for line in panel.lines):
            found[method.name] = panel
    if not found:
        return None
    up = _limits(list(found.values()))

    def paint(width: int) -> Canvas:
        wide = width > 500
        across = min(len(found), (3 if len(found) in (3, 5, 6) else 4) if wide else 1 if len(found) < 3 else 2)
        down, high = -(-len(found) // across), 190 if len(found) == 1 else 115
        left = 26 + max(len(number(tick)) for tick in ticks(*up, 5)) * LETTER * 12
        room = (width - left) / across
        canvas = Canvas(width, down * (high + 40) + 20)
        for at, (name, panel) in enumerate(found.items()):
            x, top = left + (at % across) * room, 20 + (at // across) * (high + 40)
            chosen = run.chosen is not None and run.chosen.name == name
            canvas.text(x, top - 8, name, colour="fg", font_weight="bold" if chosen else "normal")
            axes = Axes(canvas, x, top, room - 20, high, (0.0, 1.02 * panel.ends[-1] or 1.0), up)
            axes.ticks_left(5, named=at % across == 0)
            axes.ticks_below(3, whole=True)
            if at + across >= len(found):
                canvas.text(x + (room - 20) / 2, top + high + 32, "step", "middle")
            if at % across == 0:
                middle = top + high / 2
                canvas.text(11, middle, "loss", "middle", transform=f"rotate(-90 11 {middle:g})")
            _draw(axes, panel, f"curves-{width}-{at}")
        return canvas

    return picture(f"Loss against steps for {', '.join(found)}.", _caption(found), paint)


def _draw(axes: Axes, panel: Panel, slug: str) -> None:
    """`slug` is the id of what cuts off the spikes at the start."""
    canvas, fit, held_out, mean = axes.canvas, panel.fit, panel.held_out, mean_of(panel.held_out)
    box = f"M{axes.left:g} {axes.top:g}h{axes.width:g}v{axes.height:g}h{-axes.width:g}z"
    canvas.cut(slug, box)

    def draw(x: NDArray[np.float64], loss: NDArray[np.float64], colour: str, width: float, opacity: float = 1) -> None:
        points = zip(axes.x(x), axes.y(loss), strict=True)
        canvas.line(points, colour, width, opacity=opacity, clip_path=f"url(#{slug})")

    for end in panel.ends[1:-1]:
        ends = [(axes.x(end), axes.top), (axes.x(end), axes.top + axes.height)]
        canvas.line(ends, "muted", 0.8, stroke_dasharray="1 3")
    for line in fit:
        if len(fit) == 1:
            draw(line.x, line.loss, "quiet", 0.6, 0.6)
        draw(line.x, _smooth(line.loss), "muted", 1.4 if len(fit) == 1 else 0.9)
    for line in held_out:
        draw(line.x, line.loss, "accent", 0.9, 0.5 if mean else 1)
    if mean is not None:
        draw(mean.x, mean.loss, "accent", 1.8)
        for best in lowest(mean, panel.ends):
            canvas.dot(axes.x(mean.x[best]), axes.y(mean.loss[best]), 3, "card", "accent")


def mean_of(folds: Sequence[Line]) -> Line | None:
    """All folds are judged together; None where they were not."""
    if not folds or any(line.x.tolist() != folds[0].x.tolist() for line in folds):
        return None
    return Line(folds[0].x, np.mean([line.loss for line in folds], axis=0))


def lowest(mean: Line, ends: Sequence[float]) -> list[int]:
    """Where each block's losses are lowest; a block that has none is left out."""
    found = []
    for low, high in itertools.pairwise(ends):
        inside = [i for i, x in enumerate(mean.x) if low <= x <= high and np.isfinite(mean.loss[i])]
        found += [min(inside, key=lambda i: float(mean.loss[i]))] if inside else []
    return found


def _block_ends(parts: Sequence[Mapping[str, Any]]) -> list[float]:
    """Where each block begins on the common axis: steps count from one again in every block."""
    last: dict[int, float] = {}
    for part in parts:
        block = part["block"]
        last[block] = max([last.get(block, 0.0), *part["x"]])
    return [0.0, *itertools.accumulate(last.get(block, 0.0) for block in range(max(last, default=-1) + 1))]


def _lines(parts: Sequence[Mapping[str, Any]], ends: list[float]) -> list[Line]:
    folds: dict[int, list[tuple[float, float]]] = {}
    for part in sorted(parts, key=lambda p: p["block"]):
        start = ends[part["block"]]
        losses = [np.nan if loss is None else float(loss) for loss in part["loss"]]
        points = zip((start + float(x) for x in part["x"]), losses, strict=False)
        folds.setdefault(part["fold"], []).extend(points)
    return [
        Line(np.array([x for x, _ in points]), np.array([y if np.isfinite(y) else np.nan for _, y in points]))
        for _, points in sorted(folds.items())
        if points
    ]


def _smooth(loss: NDArray[np.float64]) -> NDArray[np.float64]:
    """A moving average that knows gaps: batches are noisy."""
    width = max(1, len(loss) // 12)
    kernel = np.ones(width)
    there = np.isfinite(loss)
    total = np.convolve(np.where(there, loss, 0.0), kernel, mode="same")
    number = np.convolve(there.astype(float), kernel, mode="same")
    return np.asarray(np.where(there & (number > 0), total / np.maximum(number, 1), np.nan))


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """Without the spikes at the start, so that what matters is visible."""
    fit = np.concatenate([_smooth(line.loss) for panel in panels for line in panel.fit] or [np.empty(0)])
    held_out = [line.loss[1:] if len(line.loss) > 2 else line.loss for panel in panels for line in panel.held_out]
    later = np.concatenate(held_out or [np.empty(0)])
    values = np.concatenate([fit, later])
    values, later = values[np.isfinite(values)], later[np.isfinite(later)]
    if not values.size:
        return 0.0, 1.0
    low, high = (float(end) for end in (values.min(), max(np.quantile(values, 0.98), later.max(initial=-np.inf))))
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
    return low - margin, high + margin


def _caption(found: Mapping[str, Panel]) -> str:
    text = "Grey is the loss on the data the weights are fitted on, smoothed."
    if any(panel.held_out for panel in found.values()):
        text += (
            " Thin blue is the loss on what a fold leaves out, one line per fold. The first few steps are taken at"
            " several rates, each time from the start. Folds are stopped together, where the loss on all of it is"
            " lowest; thick blue is their mean, and the ring its lowest point. When blue rises while grey falls, the"
            " weights begin to overfit."
        )
    else:
        text += " There is no held-out data in these methods, so the last point was kept."
    if any(len(panel.ends) > 2 for panel in found.values()):
        text += " Dotted lines are where the next block of ingredients was loaded."
    if any(not np.isfinite(line.loss).all() for panel in found.values() for line in panel.lines):
        text += " Gaps are steps whose loss was not a finite number."
    return text
