"""How the mixing weights of the learned soups are distributed; those outside [0, 1] stand out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stockpot.report import words
from stockpot.report.charts import canvas
from stockpot.report.charts.canvas import COLOURS, Picture, picture
from stockpot.report.charts.coefficients import outside
from stockpot.report.record import Method, Run

if TYPE_CHECKING:
    from stockpot.report.charts.canvas import Figure

MOST = 3
FIRST = ("learned+", "mehl+", "crossfit", "hl+")  # the paper's pair, our default, and what stands in


def distribution(run: Run) -> Picture | None:
    shown = _chosen(run)
    if not shown:
        return None
    weights = {m.name: m.W.ravel() for m in shown if m.W is not None}
    shares = {name: float(outside(W).mean()) for name, W in weights.items()}
    everything = np.concatenate(list(weights.values()))
    low, high = _range(everything)
    edges = _edges(low, high)
    stated = ", ".join(f"{name} {words.share(part)}" for name, part in shares.items())
    alt = f"Histograms of mixing weights. Extrapolated, that is below 0 or above 1: {stated}."

    def paint(width: int) -> Figure:
        wide = width > 500
        fig = canvas.figure(width, 44 + 92 * len(shown))
        panels = fig.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, W) in zip(panels, weights.items(), strict=True):
            heights, _ = np.histogram(
                np.clip(W, edges[0], edges[-1]), edges, weights=np.full(len(W), 100 / len(W))
            )
            middles = (edges[:-1] + edges[1:]) / 2
            out = (middles < 0) | (middles > 1)
            for part, tint in ((~out, "accent"), (out, "outside")):
                bars = [
                    (edges[i], 0.0, edges[i + 1] - edges[i], heights[i])
                    for i in np.flatnonzero(part & (heights > 0))
                ]
                canvas.patches(axes, bars, COLOURS[tint])
            axes.set_xlim(edges[0], edges[-1])
            axes.set_ylim(0, max(heights.max() * 1.06, 1e-9))
            axes.axvline(0, color=COLOURS["muted"], linewidth=0.8)
            if high > 1:
                axes.axvline(1, color=COLOURS["muted"], linewidth=0.8)
            axes.set_title(
                name, fontweight="bold" if run.recommended and run.recommended.name == name else "normal"
            )
            axes.set_title(
                f"{words.share(shares[name])} extrapolated",
                loc="right",
                color=COLOURS["outside" if shares[name] else "muted"],
            )
            axes.grid(axis="y")
            canvas.few_ticks(axes.yaxis, 3)
            axes.spines["left"].set_visible(False)
            axes.set_ylabel("% of weights" if wide else "%", fontsize=10)
        canvas.few_ticks(panels[-1].xaxis, 9 if wide else 5)
        panels[-1].set_xlabel("mixing weight (orange: below 0 or above 1)")
        return fig

    return picture(
        "distribution",
        alt,
        _caption(shares, len(run.names), bool(np.median(np.abs(everything)) < 0.1)),
        paint,
    )


def _chosen(run: Run) -> list[Method]:
    able = [m for m in run.methods if m.learned and m.W is not None and m.W.size > 1]
    fine = [m for m in able if m.W is not None and m.W.shape[1] > 1] or able
    first = sorted(fine, key=lambda m: FIRST.index(m.name) if m.name in FIRST else len(FIRST))[:MOST]
    return [m for m in fine if m in first]


def _range(values: NDArray[np.float64]) -> tuple[float, float]:
    """All but the most extreme weights, which are counted in the outermost bars."""
    low, high = (float(q) for q in np.quantile(values, [0.001, 0.999]))
    low, high = min(low, 0.0), max(high, low + 1e-3)
    margin = 0.03 * (high - low)
    return low - margin, high + margin


def _edges(low: float, high: float) -> NDArray[np.float64]:
    """About sixty bars; 0 and 1 are edges, so that no bar mixes weights from inside and outside."""
    step = 1 / np.ceil(60 / (high - low))
    first, last = np.floor(low / step), np.ceil(high / step)
    return np.asarray(np.arange(first, last + 1) * step)


def _caption(shares: dict[str, float], models: int, near_zero: bool) -> str:
    free = [name for name, part in shares.items() if part > 0]
    bound = [name for name, part in shares.items() if part == 0]
    text = (
        "All mixing weights, over all ingredients and parts of the model;"
        f" an even mix would put every one at {1 / models:.3g}."
    )
    if near_zero:
        text += " Most lie near zero."
    if free and bound:
        text += (
            f" {_and(bound)} only interpolates: its weights stay between 0 and 1."
            if len(bound) == 1
            else f" {_and(bound)} only interpolate: their weights stay between 0 and 1."
        )
    if free:
        stated = _and([f"{name} {words.share(shares[name])}" for name in free])
        text += f" Extrapolated weights let a soup move away from an ingredient; their share is {stated}."
    return text


def _and(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
