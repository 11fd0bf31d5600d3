"""How the figures look: light, labelled, readable without colour."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One colour and one marker per method, the same in every figure.
STYLES = {
    "crossfit": ("#0b6bcb", "o"),
    "mehl+": ("#c2410c", "s"),
    "greedy": ("#4d7c0f", "^"),
    "uniform": ("#7c3aed", "D"),
    "best": ("#6b7280", "v"),
    "learned+": ("#b45309", "P"),
}
ZOO_STYLES = (("#0b6bcb", "o"), ("#c2410c", "s"), ("#4d7c0f", "^"), ("#7c3aed", "D"))
_RC: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "stockpot",  # the same results give the same bytes
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "figure.facecolor": "white",  # a page may be dark
    "text.parse_math": False,
}


def draw(
    path: Path, rows: int, columns: int, size: tuple[float, float], paint: Callable[[list[Axes]], None]
) -> None:
    """`paint` gets the axes, row by row; `size` is of one of them, in inches."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # From the defaults: a matplotlibrc of the user must not change the figures.
    every: dict[Any, Any] = dict(matplotlib.rcParamsDefault.items())
    style: Any = {**{key: value for key, value in every.items() if not key.startswith("backend")}, **_RC}
    with matplotlib.rc_context(style):
        figure: Figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
        paint(list(figure.subplots(rows, columns, squeeze=False).flat))
        FigureCanvasSVG(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def line(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    ends: Sequence[tuple[float, float]] | None,
    style: tuple[str, str],
    label: str,
) -> None:
    """Points joined by a line, with bars from `ends`; values in percent or points."""
    colour, marker = style
    if ends is not None:
        down = [max(0.0, value - low) for value, (low, _) in zip(y, ends, strict=True)]
        up = [max(0.0, high - value) for value, (_, high) in zip(y, ends, strict=True)]
        axes.errorbar(x, y, yerr=[down, up], fmt="none", ecolor=colour, elinewidth=1, alpha=0.45)
    axes.plot(x, y, color=colour, marker=marker, markersize=5.5, linewidth=1.6, label=label)


def ticks_at(axes: Axes, values: Sequence[float], *, log: bool = False) -> None:
    """Ticks where something was measured, and nowhere else."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    places = sorted(set(values))
    if log:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(places))
    # On a logarithmic axis two numbers that are too near would be written over each other: the smaller one is said.
    said: list[float] = []
    for place in places:
        if not log or not said or place >= max(1.2, (places[-1] / places[0]) ** 0.11) * said[-1]:
            said.append(place)
    labels = [f"{place:g}" if place in said else "" for place in places]
    axes.xaxis.set_major_formatter(FixedFormatter(labels))
    axes.xaxis.set_minor_locator(NullLocator())


def log_shares(axes: Axes) -> None:
    """A logarithmic axis labelled with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def beside(values: Sequence[float], number: int, of: int) -> list[float]:
    """Line `number` of several on a logarithmic axis, moved a little, so that bars do not hide each other."""
    return [value * (1 + 0.016 * (number - (of - 1) / 2)) for value in values]


def hide(axes: Any) -> None:
    axes.set_axis_off()
