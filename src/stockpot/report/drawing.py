"""Charts as small inline SVGs, which take fonts and colours from the page: one serves light, dark and print.

Places are pixels from the top left. Every chart is drawn twice, for a desktop and for a phone, because shrunken text is
not readable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

WIDE, NARROW = 820, 328  # CSS pixels; the page switches between them
LETTER = 0.56  # about how wide a letter is, in units of its size


@dataclass(frozen=True)
class Picture:
    """One chart: drawn for both widths, and its caption."""

    wide: str
    narrow: str
    caption: str
    cells: Mapping[str, Any] | None = None  # of the wide one, where a pointer tells values: geometry, names, numbers


def picture(alt: str, caption: str, paint: Callable[[int], Canvas]) -> Picture:
    """`paint` draws for a width in pixels."""
    with np.errstate(all="ignore"):  # numbers of a file may be so large that their difference is none
        return Picture(paint(WIDE).svg(alt), paint(NARROW).svg(alt), caption)


class Canvas:
    """What has been drawn. Colours are names of the page's."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._made: list[str] = []

    def add(self, tag: str, inside: str = "", *, said: str = "", **given: Any) -> None:
        """One element; `inside` is its text, and `said` what a pointer is told."""
        colours = {name: given.pop(name) for name in ("fill", "stroke") if name in given}
        style = ";".join(f"{name}:{'none' if one == 'none' else f'var(--{one})'}" for name, one in colours.items())
        pairs = {**given, "style": style}
        attributes = "".join(f' {name.replace("_", "-")}="{escape(_short(value))}"' for name, value in pairs.items())
        title = f"<title>{escape(said)}</title>" if said else ""
        within = title + escape(inside)
        self._made.append(f"<{tag}{attributes}>{within}</{tag}>" if within else f"<{tag}{attributes}/>")

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", colour: str = "muted", size: float = 12, **more: Any
    ) -> None:
        self.add("text", text, x=x, y=y, text_anchor=anchor, font_size=size, fill=colour, **more)

    def line(self, points: Iterable[tuple[float, float]], colour: str, width: float = 1, **more: Any) -> None:
        """From point to point, with a gap where one is no number."""
        drawn, pen = "", "M"
        for x, y in points:
            known = math.isfinite(y)
            drawn, pen = f"{drawn}{pen}{_short(x)} {_short(y)}" if known else drawn, "L" if known else "M"
        self.add("path", d=drawn, stroke_width=width, fill="none", stroke=colour, **more)

    def dot(self, x: float, y: float, radius: float, fill: str, edge: str = "none", **more: Any) -> None:
        self.add("circle", cx=x, cy=y, r=radius, stroke_width=1.6, fill=fill, stroke=edge, **more)

    def cut(self, name: str, outline: str) -> None:
        """What has `clip_path="url(#name)"` is drawn inside of this path alone."""
        self._made.append(f'<clipPath id="{name}"><path d="{outline}"/></clipPath>')

    def svg(self, alt: str) -> str:
        width, height = _short(self.width), _short(self.height)
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        return f'<svg {size} role="img" aria-label="{escape(alt)}">{"".join(self._made)}</svg>'


@dataclass(frozen=True)
class Axes:
    """A rectangle of a canvas where numbers have their places."""

    canvas: Canvas
    left: float
    top: float
    width: float
    height: float
    across: tuple[float, float]  # the numbers at its left and at its right side
    up: tuple[float, float]  # at its bottom and at its top

    def x(self, value: Any) -> Any:
        return self.left + self.width * (value - self.across[0]) / (self.across[1] - self.across[0])

    def y(self, value: Any) -> Any:
        return self.top + self.height * (self.up[1] - value) / (self.up[1] - self.up[0])

    def ticks_below(self, most: int, *, grid: bool = False, whole: bool = False) -> None:
        bottom = self.top + self.height
        for tick in ticks(*self.across, most, whole):
            if grid:
                self.canvas.line([(self.x(tick), self.top), (self.x(tick), bottom)], "grid")
            self.canvas.text(self.x(tick), bottom + 15, number(tick), "middle")
        self.canvas.line([(self.left, bottom), (self.left + self.width, bottom)], "grid")

    def ticks_left(self, most: int, *, named: bool = True) -> None:
        for tick in ticks(*self.up, most):
            self.canvas.line([(self.left, self.y(tick)), (self.left + self.width, self.y(tick))], "grid")
            if named:
                self.canvas.text(self.left - 5, self.y(tick) + 4, number(tick), "end")


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers between two ends, in at most so many steps."""
    least = (high - low) / most
    if not math.isfinite(least):
        return []
    step = max(round_up(least, (1, 2, 5, 10)), 1.0 if whole else 0.0)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def round_up(value: float, steps: Iterable[float]) -> float:
    """The next of some steps, times a power of ten; 1 where there is none."""
    if not math.isfinite(value) or value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in steps if step * power >= value * 0.999), 1.0)


def number(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")


def _short(value: Any) -> str:
    """Hundredths of a pixel are enough."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
