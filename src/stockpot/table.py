"""The table of methods: what each reached and what it cost, as text, as HTML and as plain numbers."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stockpot import words

SAME = ("the same model", "no difference")
DATA = {"report": "report data", "held_out": "held-out data", "fit": "fitting data"}


@dataclass(frozen=True)
class Score:
    value: float
    low: float
    high: float
    n: int

    @staticmethod
    def read(given: Mapping[str, Any] | None) -> Score | None:
        if given is None or given["value"] is None:
            return None
        value = float(given["value"])
        low, high = (value if given[end] is None else float(given[end]) for end in ("low", "high"))
        return Score(value, low, high, given["n"])


@dataclass(frozen=True)
class Cell:
    """What one method reached on one set of data."""

    metric: words.Metric
    score: Score | None
    difference: tuple[float, float, float] | None  # to the best individual: mean, low, high; paired, 95 %

    @property
    def tone(self) -> str:
        """ "good" or "bad" where the difference is beyond chance."""
        low, high = (0.0, 0.0) if self.difference is None else self.difference[1:]
        return "good" if low > 0 else "bad" if high < 0 else ""

    @property
    def same(self) -> bool:
        """Whether it is what the best individual reached, on every draw."""
        return self.difference == (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Row:
    """What one method reached and cost. `kind` is the data it was scored on: report, held_out or fit."""

    method: str
    kind: str
    sets: Mapping[str, Cell]  # by set of data, the one that counts first
    seconds: float
    peak_host: int  # bytes
    peak_device: int
    models_used: int
    chosen: bool  # its soup is the run's
    recommended: bool  # and the verdict says to use it
    baseline: bool
    servable: bool  # one model to serve; the ensemble is not

    @property
    def first(self) -> Cell:
        """On the set that counts."""
        return next(iter(self.sets.values()))

    @property
    def metric(self) -> words.Metric:
        """Of the set that counts."""
        return self.first.metric

    @property
    def title(self) -> str:
        """What the scores are, over all sets."""
        axes = list(dict.fromkeys(cell.metric.axis for cell in self.sets.values()))
        if len(axes) == 1:
            return axes[0]
        return ", ".join(f"{cell.metric.axis} on {name}" for name, cell in self.sets.items())

    @property
    def peak(self) -> int:
        """The scarce memory: of the device where one was used, else of the host."""
        return self.peak_device or self.peak_host

    @property
    def unchanged(self) -> str:
        """What stands in place of a difference of nothing."""
        return SAME[self.models_used != 1]

    def cells(self) -> tuple[str, ...]:
        """As text, in the order of `headings`."""
        cells = [self.method]
        for one in self.sets.values():
            m, score, change = one.metric, one.score, "–"
            if one.difference is not None:
                change = self.unchanged if one.same else "{} ({} to {})".format(*map(m.change, one.difference))
            cells.append("–" if score is None else m.value(score.value))
            cells.append("–" if score is None else f"{m.bare(score.low)} to {m.bare(score.high)}")
            cells.append(change)
        return (*cells, words.seconds(self.seconds), words.size(self.peak), str(self.models_used))

    def short_cells(self) -> tuple[str, ...]:
        """Narrower, so that the table of one set fits 80 columns; that of several sets leaves out the costs."""

        def short(value: float, percent: bool, sign: str = "") -> str:
            if percent:
                return f"{100 * value:{sign}.1f}"
            return f"{value:{sign}.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:{sign}.2g}"

        cells, one = [self.method], len(self.sets) == 1
        for cell in self.sets.values():
            score, change, percent = cell.score, cell.difference, cell.metric.unit == "%"
            value = "-" if score is None else cell.metric.value(score.value)
            dash = "–" if percent else " to "  # behind which a minus would be misread
            between = "-" if score is None else f"{short(score.low, percent)}{dash}{short(score.high, percent)}"
            cells += [value, between] if one else [value if score is None else f"{value} ({between})"]
            apart = "-" if change is None else "{} ({} to {})".format(*(short(end, percent, "+") for end in change))
            cells.append(self.unchanged if cell.same else apart)
        costs = (words.seconds(self.seconds), words.size(self.peak), str(self.models_used))
        return (*cells, *costs) if one else tuple(cells)


def headings(rows: Sequence[Row]) -> tuple[str, ...]:
    sets = set_headings(rows)
    each = (heading for name in sets for heading in (name, "95 % interval", "vs. best single model"))
    return ("method", *each, "time", "peak memory", "models used")


def set_headings(rows: Sequence[Row]) -> list[str]:
    """One for each set: its metric where there is one set, its name where all have one metric, else both."""
    sets = rows[0].sets
    if len(sets) == 1:
        return [rows[0].metric.title]
    same = len({cell.metric for cell in sets.values()}) == 1
    return [name if same else f"{name}, {cell.metric.title}" for name, cell in sets.items()]


def short_headings(rows: Sequence[Row]) -> tuple[str, ...]:
    """Those of `short_cells`."""
    if len(rows[0].sets) > 1:
        return ("method", *(heading for name in set_headings(rows) for heading in (name, "vs. best single")))
    return ("method", rows[0].metric.title, "95 % CI", "vs. best single", "time", "memory", "models")


def as_text(rows: Sequence[Row]) -> list[str]:
    """Lines; the row of the chosen soup begins with a star."""
    marked = next((number for number, row in enumerate(rows) if row.chosen and len(rows) > 1), None)
    return words.aligned(short_headings(rows), [row.short_cells() for row in rows], marked)


def as_html(rows: Sequence[Row]) -> str:
    """A table for notebooks; the row of the chosen soup is bold."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(words.harmless(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = (line(row.cells(), "th" if row.chosen and len(rows) > 1 else "td") for row in rows)
    return f"<table><thead>{line(headings(rows), 'th')}</thead><tbody>{''.join(body)}</tbody></table>"


def as_markdown(rows: Sequence[Row]) -> list[str]:
    """The table and a line that says on which data; the row of the chosen soup is bold."""

    def line(row: Row) -> str:
        cells = [words.escaped(cell) for cell in row.cells()]
        if row.chosen and len(rows) > 1:
            cells[:2] = [f"**{cell}**" for cell in cells[:2]]
        return f"| {' | '.join(cells)} |"

    named = [words.escaped(heading) for heading in headings(rows)]
    counts = f"Scores are {words.escaped(rows[0].title)} on {DATA[rows[0].kind]}."
    paired = " Differences are paired sample by sample, with their 95 % interval."
    apart = any(cell.difference is not None for row in rows for cell in row.sets.values())
    table = [f"| {' | '.join(named)} |", "|---|" + "---:|" * (len(named) - 1), *map(line, rows)]
    return [*table, "", counts + paired * apart]


def as_numbers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One dict per method and set of data, such as `pandas.DataFrame` takes."""
    return [
        {
            "method": row.method,
            "metric": cell.metric.name,
            "data": row.kind,
            "set": name,
            **_ends("", None if cell.score is None else (cell.score.value, cell.score.low, cell.score.high)),
            **_ends("difference", cell.difference),
            "seconds": row.seconds,
            "peak_bytes": row.peak,
            "models_used": row.models_used,
            "recommended": row.recommended,
        }
        for row in rows
        for name, cell in row.sets.items()
    ]


def _ends(what: str, found: tuple[float, float, float] | None) -> dict[str, float | None]:
    names = (what, f"{what}_low", f"{what}_high") if what else ("score", "low", "high")
    return dict(zip(names, found or (None, None, None), strict=True))
