"""Numbers and names as people read them: units, signs, and labels short enough for a chart."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """How scores are written: shares in percent, others as the number they are, with its unit where it has one."""

    name: str = "accuracy"
    unit: str = "%"  # "%", "nats", "bits" or nothing

    @property
    def scale(self) -> float:
        return 100.0 if self.unit == "%" else 1.0

    @property
    def title(self) -> str:
        if self.name in ("loss", "perplexity", "nats_per_token", "bits_per_byte"):
            return f"{self.name.replace('_', ' ')} (negated)"  # higher is better everywhere
        return self.name.replace("_", " ")

    @property
    def points(self) -> str:
        """The unit of differences."""
        return "points" if self.unit == "%" else self.unit

    @property
    def axis(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit == "%" else self.title

    def value(self, score: float) -> str:
        return f"{self.bare(score)} {self.unit}".rstrip() if math.isfinite(score) else "none"

    def bare(self, score: float) -> str:
        if not math.isfinite(score):
            return "?"
        shown = f"{100 * score:.2f}" if self.unit == "%" else _decimal(score)
        return shown.replace("-", "−")

    def between(self, ends: Mapping[str, Any] | Sequence[Any] | None) -> str:
        """An interval in brackets, behind a space; nothing where it is not known."""
        known = (ends["low"], ends["high"]) if isinstance(ends, Mapping) else tuple(ends or ())
        return "" if len(known) != 2 or None in known else " ({} to {})".format(*map(self.bare, known))

    def change(self, difference: float) -> str:
        if not math.isfinite(difference):
            return "?"
        shown = f"{100 * difference:+.2f}" if self.unit == "%" else _decimal(difference, "+")
        return shown.replace("-", "−") if float(shown) else shown.lstrip("+-")


def seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if value < 10:
        return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(value: float | None) -> str:
    if value is None or not math.isfinite(value) or value <= 0:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def bytes_of(given: object) -> int | None:
    """Of a number of bytes, or a size with its unit such as 5GB or 8GiB; None of anything else."""
    match = re.fullmatch(r"\s*(\d*\.?\d+)\s*([kmgt]?)(i?)b?\s*", str(given), re.IGNORECASE)
    if match is None or isinstance(given, (float, bool)):
        return None
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ")) or None


def count(value: int) -> str:
    """Large counts as a person says them: 22.7 million."""
    for step, word in ((1e9, "billion"), (1e6, "million")):
        if value >= step:
            return f"{value / step:.1f} {word}"
    return f"{value:,}"


def share(part: float) -> str:
    """A share in percent that never rounds something to nothing."""
    percent = 100 * part
    if 0 < percent < 0.1:
        return "under 0.1 %"
    return f"{percent:.1f} %" if percent < 10 and percent else f"{percent:.0f} %"


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def first_of(lines: Sequence[str], limit: int = 8) -> str:
    """The first few, one below the other, and how many more there are."""
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n    ".join([*lines[:limit], *more])


def columns(text: str) -> int:
    """How many narrow letters wide a text is; East Asian wide letters count twice."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def middle(text: str, limit: int) -> str:
    """The text with its middle left out, at most `limit` letters wide."""
    text = " ".join(text.split())
    if columns(text) <= limit:
        return text
    head = _beginning(text, limit // 2)
    return f"{head}…{_beginning(text[::-1], limit - 1 - columns(head))[::-1]}"


def _beginning(text: str, limit: int) -> str:
    """As many letters as fit."""
    width = 0
    for i, letter in enumerate(text):
        width += columns(letter)
        if width > limit:
            return text[:i]
    return text


def labels(names: Sequence[str], limit: int) -> list[str]:
    """Short and still different from each other: long names lose what they share first, then their middle."""
    short = [middle(name, limit) for name in names]
    if len(set(short)) == len(names):
        return short
    prefix = _shared(names)
    suffix = _shared([name[prefix:][::-1] for name in names])
    own = ["…" + name[prefix : len(name) - suffix] + ("…" if suffix else "") for name in names]
    short = [middle(name, limit) for name in own]
    if len(set(short)) == len(names):
        return short
    return [f"{k} {middle(name, max(3, limit - 4))}" for k, name in enumerate(own, start=1)]


def _decimal(value: float, sign: str = "") -> str:
    """The same number of decimals for numbers of one table; other notation only where that says nothing."""
    return f"{value:{sign}.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:{sign}.3g}"


def _shared(names: Sequence[str]) -> int:
    """How many letters all names begin with."""
    first, last = min(names), max(names)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def harmless(text: str) -> str:
    """Names come from files of strangers: what could steer a terminal or hide text is shown as its code instead."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def escaped(text: str) -> str:
    """For Markdown. Names are anybody's: nothing in them may become markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$&!])", r"\\\1", " ".join(text.split()))


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], marked: int | None = None) -> list[str]:
    """The lines of a table: first column to the left, the rest to the right, row `marked` behind a star."""
    lines = [headings, *([harmless(cell).replace("\n", "\\n") for cell in row] for row in rows)]
    widths = [max(map(columns, column)) for column in zip(*lines, strict=True)]
    found = []
    for number, line in enumerate(lines, start=-1):
        first, *rest = (" " * (width - columns(cell)) for cell, width in zip(line, widths, strict=True))
        cells = [line[0] + first, *(space + cell for space, cell in zip(rest, line[1:], strict=True))]
        found.append(f"{'*' if number == marked else ' '} {'  '.join(cells)}".rstrip())
    return found
