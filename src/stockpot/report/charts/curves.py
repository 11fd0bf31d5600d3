"""Fit and held-out loss while the mixing weights were learned."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stockpot.report.charts import drawing
from stockpot.report.charts.drawing import COLOURS, Picture, picture
from stockpot.report.reading import Run

if TYPE_CHECKING:
    from stockpot.report.charts.drawing import Axes, Figure


@dataclass(frozen=True, eq=False)
class Line:
    """One fold's losses over all blocks, on one axis of steps."""

    x: NDArray[np.float64]
    loss: NDArray[np.float64]  # NaN where it was not finite


def curves(run: Run) -> Picture | None:
    found = {
        m.name: (_lines(m.result["curves"]["fit"], ends), _lines(m.result["curves"]["held_out"], ends), ends)
        for m in run.methods
        for ends in [_block_ends([*m.result["curves"]["fit"], *m.result["curves"]["held_out"]])]
    }
    found = {name: panel for name, panel in found.items() if any(_finite(line) for part in panel[:2] for line in part)}
    if not found:
        return None
    held = any(panel[1] for panel in found.values())
    alt = f"Loss against steps for {', '.join(found)}."

    def paint(width: int) -> Figure:
        wide = width > 500
        across = min(len(found), (3 if len(found) in (3, 5, 6) else 4) if wide else 1 if len(found) < 3 else 2)
        down = -(-len(found) // across)
        fig = drawing.figure(width, 40 + down * (250 if len(found) == 1 else 165))
        grid = fig.subplots(down, across, squeeze=False, sharey=True)
        for axes, (name, (fit, held_out, ends)) in zip(grid.flat, found.items(), strict=False):
            chosen = run.chosen is not None and run.chosen.name == name
            _panel(axes, fit, held_out, ends)
            axes.set_title(name, fontweight="bold" if chosen else "normal")
        for axes in grid.flat[len(found) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel("loss")
        for axes in grid.flat[max(0, len(found) - across) : len(found)]:
            axes.set_xlabel("step")
        grid[0, 0].set_ylim(
            *_limits(
                [line for panel in found.values() for line in panel[0]],
                [line for panel in found.values() for line in panel[1]],
            )
        )
        return fig

    return picture("curves", alt, _caption(held, found), paint)


def _panel(axes: Axes, fit: list[Line], held_out: list[Line], ends: list[float]) -> None:
    for end in ends[1:-1]:
        axes.axvline(end, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (1, 3)))
    thin = 1.4 if len(fit) == 1 else 0.9
    for line in fit:
        if len(fit) == 1:
            axes.plot(line.x, line.loss, color=COLOURS["quiet"], linewidth=0.6, alpha=0.6)
        axes.plot(line.x, _smooth(line.loss), color=COLOURS["muted"], linewidth=thin)
    mean = mean_of(held_out)
    for line in held_out:
        axes.plot(line.x, line.loss, color=COLOURS["accent"], linewidth=0.9, alpha=0.5 if mean else 1.0)
    if mean is not None:
        axes.plot(mean.x, mean.loss, color=COLOURS["accent"], linewidth=1.8, marker=".", markersize=3)
        for best in lowest(mean, ends):
            axes.plot(
                mean.x[best : best + 1],
                mean.loss[best : best + 1],
                marker="o",
                markersize=6,
                markerfacecolor=COLOURS["card"],
                markeredgecolor=COLOURS["accent"],
                markeredgewidth=1.6,
                linestyle="none",
                zorder=5,
            )
    axes.grid(axis="y")
    drawing.whole_numbers(axes.xaxis, 4)
    drawing.few_ticks(axes.yaxis, 5)


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
    ends = [0.0]
    for block in range(max(last, default=-1) + 1):
        ends.append(ends[-1] + last.get(block, 0.0))
    return ends


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


def _limits(fit: list[Line], held_out: list[Line]) -> tuple[float, float]:
    """Without the spikes at the start, so that what matters is visible."""
    later = [line.loss[1:] if len(line.loss) > 2 else line.loss for line in held_out]
    parts = [part[np.isfinite(part)] for part in (*(_smooth(line.loss) for line in fit), *later)]
    values = np.concatenate(parts)
    if not values.size:
        return 0.0, 1.0
    low, high = (float(q) for q in np.quantile(values, [0.0, 0.98]))
    high = max([high, *(float(part.max()) for part in parts[len(fit) :] if part.size)])
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
    return low - margin, high + margin


def _finite(line: Line) -> bool:
    return bool(np.isfinite(line.loss).any())


def _caption(held: bool, found: Mapping[str, tuple[list[Line], list[Line], list[float]]]) -> str:
    text = "Grey is the loss on the data the weights are fitted on, smoothed."
    if held:
        text += (
            " Thin blue is the loss on what a fold leaves out, one line per fold. Folds are stopped together, where the"
            " loss on all of it is lowest; thick blue is their mean, and the ring its lowest point. When blue rises"
            " while grey falls, the weights begin to overfit."
        )
    else:
        text += " There is no held-out data in these methods, so the last point was kept."
    if any(len(panel[2]) > 2 for panel in found.values()):
        text += " Dotted lines are where the next block of ingredients was loaded."
    if any(not np.isfinite(line.loss).all() for panel in found.values() for part in panel[:2] for line in part):
        text += " Gaps are steps whose loss was not a finite number."
    return text
