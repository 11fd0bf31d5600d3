"""The mixing weights of one soup as coloured cells: a row for each ingredient, a column for each part of the model.

Cells lie on whole pixels and each step of colour is one path, so 72 x 140 cells are a few hundred kilobytes at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stockpot import words
from stockpot.report.drawing import LETTER, Canvas, Picture, picture, round_up
from stockpot.report.reading import Method, Run

TOP = 20  # pixels above the cells
MOST = 72  # rows: of more ingredients the chart shows some, and its caption says which
DOT = 7  # pixels; smaller cells have no room for a mark
LEVELS = 7  # steps of the colour scale on each side of zero
TOLERANCE = 1e-9  # weights of 0 and 1 that went through arithmetic are not extrapolated


def outside(W: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which weights are extrapolated: below 0 or above 1."""
    return np.asarray((W < -TOLERANCE) | (W > 1 + TOLERANCE))


def weights_by_group(run: Run, method: Method) -> Picture | None:
    W = method.W
    if W is None or not W.size or W.shape[1] < 2:
        return None
    order = _heaviest(run.best_first, np.abs(W).max(axis=1))
    W = W[order]  # (K or fewer, G)
    names = [run.names[k] for k in order]
    limit = nice(float(np.quantile(np.abs(W), 0.995)))
    extrapolated = outside(W)
    K, G = W.shape
    alt = (
        f"Mixing weights of the {method.name} soup: {K} ingredients by {G} groups of tensors,"
        f" from {W.min():.2f} to {W.max():.2f}; {words.share(extrapolated.mean())} are below 0 or above 1."
    )
    told: list[dict[str, Any]] = []  # of each width

    def paint(width: int) -> Canvas:
        wide, high = width > 500, max(9, min(20, 640 // K))  # `high` and `across` are those of a cell
        font = min(11.0 if wide else 10.0, high - 1.0)
        rows = words.labels(names, 26 if wide else 14)
        left = int(max(map(words.columns, rows)) * font * 0.62) + 10
        room = width - left - 2
        bins = min(G, room // (5 if wide else 4))
        across = max(2, min(room // bins, 72))
        values, marked, starts = _binned(W, extrapolated, bins)
        groups = [method.groups[g] for g in starts]
        numbers = [[round(float(value), 3) for value in row] for row in values]
        place = {"left": left, "top": TOP, "width": across, "height": high}
        told.append({**place, "rows": names, "columns": groups, "values": numbers})
        canvas = Canvas(width, TOP + K * high + 46)
        for y, row in enumerate(rows):
            canvas.text(left - 4, TOP + (y + 0.5) * high + 0.36 * font, row, "end", "fg", font)
        found = levels(values, limit)
        for level in np.unique(found):
            cells = [(left + x * across, TOP + y * high, w * across) for x, y, w in _runs(found == level)]
            drawn = "".join(f"M{x} {y}h{w}v{high}h{-w}z" for x, y, w in cells)
            canvas.add("path", d=drawn, shape_rendering="crispEdges", fill=colour(level))
        for y, x in np.argwhere(marked) if min(across, high) >= DOT else ():
            strong = abs(found[y, x]) > LEVELS // 2  # there the mark takes the page's colour
            canvas.dot(left + (x + 0.5) * across, TOP + (y + 0.5) * high, 1.1, "card" if strong else "fg")
        _parts(canvas, groups, left, across, K * high)
        _legend(canvas, W, limit, left, TOP + K * high + 14)
        return canvas

    made = picture(alt, _caption(method, extrapolated) + _left_out(run, order), paint)
    return replace(made, cells=told[0])


def _heaviest(best_first: list[int], weight: NDArray[np.float64]) -> list[int]:
    """Those of the ingredients that matter most, where there are more than a chart has rows for; best first."""
    kept = set(np.argsort(-weight, kind="stable")[:MOST].tolist())
    return [k for k in best_first if k in kept]


def _left_out(run: Run, shown: Sequence[int]) -> str:
    if len(shown) == len(run.names):
        return ""
    return f" Shown are the {len(shown)} ingredients with the largest weights, of {len(run.names)}."


def levels(values: NDArray[np.float64], limit: float) -> NDArray[np.int64]:
    """-LEVELS to LEVELS; a negative value is never shown as zero or above, nor the other way round."""
    steps = np.nan_to_num(values) / limit * LEVELS
    whole = np.clip(np.ceil(np.abs(steps) - 0.5), 0, LEVELS)
    whole = np.where((values < 0) & (whole == 0), 1, whole)
    return np.asarray(np.where(values < 0, -whole, whole), dtype=np.int64)


def colour(level: int) -> str:
    return "zero" if level == 0 else f"p{level}" if level > 0 else f"n{-level}"


def nice(limit: float) -> float:
    """The next round number, for the end of the colour scale."""
    return round_up(limit, (1, 1.5, 2, 3, 4, 5, 6, 8, 10))


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """Neighbouring cells of a row become one rectangle: x, y and width, in cells."""
    found: list[tuple[int, int, int]] = []
    for y, row in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]]))).tolist()
        found += [(a, y, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return found


def _binned(
    W: NDArray[np.float64], extrapolated: NDArray[np.bool_], bins: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_], list[int]]:
    """Neighbouring groups share a column when there are more than fit; a column keeps its largest weight."""
    G = W.shape[1]
    if bins >= G:
        return W, extrapolated, list(range(G))
    starts = [i * G // bins for i in range(bins)]
    parts = [W[:, a:b] for a, b in zip(starts, [*starts[1:], G], strict=True)]
    rows = np.arange(W.shape[0])
    values = np.stack([part[rows, np.abs(part).argmax(axis=1)] for part in parts], axis=1)
    return values, outside(values), starts


def _parts(canvas: Canvas, names: Sequence[str], left: int, across: int, height: int) -> None:
    """Name the parts of the model above their columns, as far as there is room."""
    letter = LETTER * 10
    fits = all(words.columns(name) * letter + 4 <= across for name in names)
    blocks = list(names) if fits else [block_name(name) for name in names]
    edges = [0, *(i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1]), len(blocks)]
    free = 0.0
    for a, b in itertools.pairwise(edges):
        start, end = a * across, b * across
        if a and end - start >= 12:
            canvas.line([(left + start, TOP), (left + start, TOP + height)], "card", 1.2)
        text = words.middle(blocks[a], 22)
        needed = words.columns(text) * letter + 6
        if start >= free and start + needed <= len(blocks) * across:
            canvas.text(left + start + 1, TOP - 5, text, size=9.5)
            free = max(end, start + needed) if end - start >= needed else start + needed + 24


def block_name(group: str) -> str:
    """`encoder.layer.3.attention.query` belongs to `layer.3`, `head.weight` to `head`."""
    parts = group.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[i - 1 : i + 1]) if i else f"part {part}"
    return parts[0]


def _legend(canvas: Canvas, values: NDArray[np.float64], limit: float, left: int, top: int) -> None:
    """The colour scale as a row of swatches, without the negative half where nothing is negative."""
    first = -LEVELS if (values < 0).any() else 0
    low = f"≤ −{limit:g}" if np.nanmin(values) < -limit else f"−{limit:g}"
    high = f"≥ {limit:g}" if np.nanmax(values) > limit else f"{limit:g}"
    names, side = {first: low, 0: "0", LEVELS: high}, 12
    for i, step in enumerate(range(first, LEVELS + 1)):
        canvas.add("rect", x=left + i * side, y=top, width=side, height=10, fill=colour(step))
        if step in names:
            canvas.text(left + (i + 0.5) * side, top + 24, names[step], "middle", size=10)


def _caption(method: Method, extrapolated: NDArray[np.bool_]) -> str:
    assert method.W is not None
    K, G = method.W.shape
    parts = [
        f"The recipe of the {method.name} soup: one row per ingredient (best on top), one column per part of the model,"
        " from its input on the left to its output on the right. The stronger the blue, the more of it is in the soup;"
        f" an even mix would be {1 / K:.3g} everywhere."
    ]
    if extrapolated.any():
        parts.append(
            f"Orange is subtracted. {words.share(float(extrapolated.mean()))} of the {K * G:,} weights are extrapolated"
            " (below 0 or above 1); a dot marks them where cells are large enough."
        )
    else:
        parts.append("No weight is extrapolated (below 0 or above 1).")
    if G > 50:
        parts.append(
            f"Where there is no room for {G} columns, neighbours share one, which shows the largest of their weights."
        )
    return " ".join(parts)
