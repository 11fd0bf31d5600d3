"""One figure per question, drawn from gathered results: light, labelled, readable without colour."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from studies.loaded import Point, Results
from studies.plans import DEFAULT, PAPER
from studies.tables import POOLS

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


def draw(path: Path, rows: int, columns: int, size: tuple[float, float], paint: Callable[[list[Axes]], None]) -> None:
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


def methods(path: Path, zoos: Sequence[Results], order: Sequence[str]) -> None:
    """Every method's test accuracy over the seeds, against the best single model."""

    def paint(panels: list[Axes]) -> None:
        for axes, zoo in zip(panels, zoos, strict=True):
            rows = [(name, found) for name in order if (found := zoo.over_seeds(name)) is not None]
            best = zoo.over_seeds("best")
            if best is not None:
                axes.axvline(100 * best["report"][0], color="#9ca3af", linestyle=(0, (4, 3)), linewidth=1)
            left = _left_end([found["report"] for _, found in rows])
            for y, (name, found) in enumerate(rows):
                if 100 * found["report"][0] < left:
                    text = f"◂ {100 * found['report'][0]:.2f}"
                    axes.annotate(text, (left, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=9)
                    continue
                mean, low, high = (100 * value for value in found["report"])
                colour = STYLES[DEFAULT][0] if name == DEFAULT else "#4b5563"
                axes.plot([low, high], [y, y], color=colour, linewidth=2.2, alpha=0.45)
                for one in found["by_seed"]:
                    axes.plot([100 * one], [y], marker="|", markersize=7, color=colour, alpha=0.8)
                fill = "white" if name == "ensemble" else colour
                axes.plot([mean], [y], marker="o", markersize=6.5, color=colour, markerfacecolor=fill)
            axes.set_yticks(range(len(rows)), [name for name, _ in rows])
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.set_xlim(left=left)
            axes.grid(axis="y", visible=False)
            axes.set_xlabel("test accuracy (%)")
            axes.set_title(f"{zoo.zoo}, K = {zoo.models}")

    draw(path, 1, len(zoos), (4.1, 3.5), paint)


def _left_end(reports: Sequence[Sequence[float]]) -> float:
    """In percent: everything is shown, unless a method is so far behind that the others could not be told apart."""
    top = max(report[0] for report in reports)
    near = [report for report in reports if top - report[0] <= max(0.10, 4 * (report[2] - report[1]))]
    return 100 * min(report[1] for report in near) - 0.1


def removed(path: Path, zoos: Sequence[Results]) -> None:
    """Table 3: what is lost with the best ingredients."""
    _pools(path, zoos, "removed", lambda zoo, models: zoo.models - models, "best ingredients left out")


def cost(path: Path, zoos: Sequence[Results]) -> None:
    """Accuracy against the number of ingredients, in search order."""
    _pools(path, zoos, "cost", lambda _, models: models, "ingredients, in search order")


def _pools(path: Path, zoos: Sequence[Results], study: str, x: Callable[[Results, int], int], label: str) -> None:
    def paint(panels: list[Axes]) -> None:
        for axes, zoo in zip(panels, zoos, strict=True):
            runs = zoo.smaller_pools(study)
            for name in POOLS:
                found = [
                    (x(zoo, run["models"]), run["methods"][name]["report"])
                    for run in runs
                    if name in run["methods"] and run["methods"][name]["report"] is not None
                ]
                found.sort(key=lambda pair: pair[0])
                line(
                    axes,
                    [place for place, _ in found],
                    [100 * score["mean"] for _, score in found],
                    [(100 * score["low"], 100 * score["high"]) for _, score in found]
                    if name in (DEFAULT, "greedy")
                    else None,
                    STYLES[name],
                    name,
                )
            scores = [
                run["methods"][name]["report"]
                for run in runs
                for name in POOLS
                if name != "uniform" and name in run["methods"] and run["methods"][name]["report"] is not None
            ]
            # A uniform soup can be anywhere; it must not press the others into one line.
            axes.set_ylim(bottom=100 * min(score["mean"] for score in scores) - 1.5)
            ticks_at(axes, [x(zoo, run["models"]) for run in runs])
            axes.set_xlabel(label)
            axes.set_title(zoo.zoo)
        panels[0].set_ylabel("test accuracy (%)")
        panels[-1].legend(fontsize=9, loc="best")

    draw(path, 1, len(zoos), (4.1, 3.3), paint)


def coefficients(path: Path, zoos: Sequence[Results]) -> None:
    """Mixing weights of the methods with one per tensor."""
    names = ("learned+", PAPER, DEFAULT)

    def paint(panels: list[Axes]) -> None:
        for place, axes in enumerate(panels):
            zoo, name = zoos[place // len(names)], names[place % len(names)]
            found = zoo.value["coefficients"].get(name)
            if found is None:
                axes.set_axis_off()
                continue
            low, high = found["edges"]
            edges = np.linspace(low, high, len(found["counts"]) + 1)
            share = 100 * np.array(found["counts"]) / sum(found["counts"])
            inside = (edges[:-1] > -1e-9) & (edges[1:] < 1 + 1e-9)
            for part, colour in ((inside, "#4b5563"), (~inside, "#c2410c")):
                axes.bar(edges[:-1][part], share[part], np.diff(edges)[part], align="edge", color=colour)
            axes.axvline(1 / found["models"], color="#0b6bcb", linewidth=1, linestyle=(0, (3, 2)))
            log_shares(axes)
            axes.set_title(f"{zoo.zoo}: {name}")
            axes.set_xlabel("mixing weight")
            if place % len(names) == 0:
                axes.set_ylabel("% of weights")

    draw(path, len(zoos), len(names), (3.9, 2.5), paint)


def ablations(path: Path, zoos: Sequence[Results]) -> None:
    """b, T and J of the paper's best method: the change against `main`, on the same samples."""

    def paint(panels: list[Axes]) -> None:
        titles = ("b: models per block", "T: blocks visited", "J: steps per block")
        for axes, title in zip(panels, titles, strict=True):
            places: list[float] = []
            for number, (zoo, style) in enumerate(zip(zoos, ZOO_STYLES, strict=False)):
                found = {"b": zoo.blocks, "T": zoo.visits}.get(title[0], lambda zoo=zoo: zoo.steps(PAPER))()
                kept = [(point, change) for point in found if (change := _change(zoo, point)) is not None]
                if len(kept) < 2:  # `main` alone says nothing
                    continue
                places += [point.x for point, _ in kept]
                line(
                    axes,
                    beside([point.x for point, _ in kept], number, len(zoos)),
                    [100 * change[0] for _, change in kept],
                    [(100 * change[1], 100 * change[2]) for _, change in kept],
                    style,
                    zoo.zoo,
                )
            axes.axhline(0, color="#9ca3af", linewidth=1)
            if places:
                ticks_at(axes, places, log=True)
                axes.legend(fontsize=9, loc="best")
            else:
                axes.set_xticks([])
                axes.set_yticks([])
                axes.set_xlabel("not measured yet")
            axes.set_title(title)
        panels[0].set_ylabel(f"change of {PAPER} (points)")

    draw(path, 1, 3, (4.0, 3.2), paint)


def _change(zoo: Results, point: Point) -> Sequence[float] | None:
    """Against `main` of the same method; `main` itself is zero, exactly."""
    if point.record is zoo.of_main(PAPER):
        return (0.0, 0.0, 0.0)
    if point.run is zoo.main:  # hl+ stands for b = K
        difference = point.run["differences"][PAPER]["hl+"]
        return None if difference is None else [-difference[0], -difference[2], -difference[1]]
    found: Sequence[float] | None = point.record["to_main"]
    return found


def sensitivity(path: Path, zoos: Sequence[Results]) -> None:
    """Ours and the paper's over learning rates and steps."""

    def paint(panels: list[Axes]) -> None:
        for row, zoo in enumerate(zoos):
            for column, (title, of) in enumerate(
                (("learning rate", Results.rates), ("steps per block", Results.steps))
            ):
                axes = panels[2 * row + column]
                places: list[float] = []
                for number, name in enumerate((PAPER, DEFAULT)):
                    shown = zoo.with_curve(partial(of, method=PAPER)) if name == PAPER else zoo
                    found = of(shown, name)
                    places += [point.x for point in found]
                    line(
                        axes,
                        beside([point.x for point in found], number, 2),
                        [100 * point.accuracy for point in found],
                        [(100 * p.record["report"]["low"], 100 * p.record["report"]["high"]) for p in found],
                        STYLES[name],
                        name,
                    )
                if places:
                    ticks_at(axes, places, log=True)
                axes.set_xlabel(title)
                axes.set_title(zoo.zoo)
                if column == 0:
                    axes.set_ylabel("test accuracy (%)")
        panels[0].legend(fontsize=9, loc="best")

    draw(path, len(zoos), 2, (4.6, 2.9), paint)
