"""matplotlib's edge: figures become small inline SVGs that take their colours from the page.

Colours are drawn as placeholder hex values and written as CSS variables, so one SVG serves light, dark and print. Every
chart is drawn twice, for a desktop and for a phone, because shrunken text is not readable. Nothing here uses pyplot.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stockpot.errors import RunError, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure


WIDE, NARROW = 820, 328  # CSS pixels; the page switches between them
LEVELS = 7  # steps of a heatmap's colour scale on each side of zero

_NAMES = (
    *("fg", "muted", "grid", "card", "accent", "outside", "quiet", "good", "bad"),
    *(f"p{i}" for i in range(1, LEVELS + 1)),
    *(f"n{i}" for i in range(1, LEVELS + 1)),
    "zero",
)
COLOURS = {name: f"#5070{0x10 + i:02x}" for i, name in enumerate(_NAMES)}
_STYLE = {
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's font
    "svg.hashsalt": "stockpot",  # the same run gives the same bytes
    "font.size": 12,
    "axes.edgecolor": COLOURS["grid"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.facecolor": "none",
    "axes.titlecolor": COLOURS["fg"],
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": COLOURS["grid"],
    "legend.frameon": False,
    "legend.labelcolor": COLOURS["fg"],
    "text.color": COLOURS["fg"],
    "text.parse_math": False,  # ingredient names may hold dollar signs
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


@dataclass(frozen=True)
class Picture:
    """One chart: drawn for both widths, its caption, and its description for those who cannot see it."""

    wide: str
    narrow: str
    alt: str
    caption: str
    cells: Mapping[str, Any] | None = None  # of the wide one, where a pointer tells values: geometry, names, numbers


def picture(slug: str, alt: str, caption: str, paint: Callable[[int], Figure]) -> Picture:
    """`paint` draws the figure for a width in pixels; `slug` keeps the ids of several charts apart."""
    matplotlib = _matplotlib()
    # From the defaults: a matplotlibrc of the user must not change the report.
    defaults = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith("backend")}
    cycle = {"axes.prop_cycle": matplotlib.cycler(color=[COLOURS["fg"]])}
    with matplotlib.rc_context({**defaults, **_STYLE, **cycle}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters the measuring font lacks; the browser has its own fonts
        wide = _svg(paint(WIDE), f"{slug}-w", alt)
        narrow = _svg(paint(NARROW), f"{slug}-n", alt)
    return Picture(wide, narrow, alt, caption)


def figure(width: int, height: float, *, manual: bool = False) -> Figure:
    """In pixels: one unit of an SVG is 1/72 inch. `manual` figures place their axes themselves."""
    from matplotlib.figure import Figure as New

    return New(figsize=(width / 72, height / 72), dpi=72, layout=None if manual else "constrained")


def axes_at(fig: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place in pixels from the top left."""
    w, h = fig.get_figwidth() * 72, fig.get_figheight() * 72
    return fig.add_axes((left / w, 1 - (top + height) / h, width / w, height / h))


def patches(axes: Axes, rectangles: Iterable[tuple[float, float, float, float]], colour: str) -> None:
    """Many rectangles (x, y, width, height) of one colour as a single path: a heatmap stays small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    points: list[tuple[float, float]] = []
    codes: list[Any] = []
    for x, y, w, h in rectangles:
        points += [(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    if points:
        # Edges are left unsmoothed, else hairlines of the background show between cells.
        patch = PathPatch(Path(points, codes), facecolor=colour, edgecolor="none", linewidth=0)
        patch.set_gid(CRISP)
        axes.add_patch(patch)


def bare(axes: Axes) -> None:
    """No frame, no ticks."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def whole_numbers(axis: Any, most: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, integer=True))


def few_ticks(axis: Any, most: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most))


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise RunError(
            describe(
                "library matplotlib",
                expected="an installed one, for the charts of a report",
                found="none",
                fix="pip install 'stockpot[cli]'",
            )
        ) from error
    return matplotlib


def _svg(fig: Figure, slug: str, alt: str) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    FigureCanvasSVG(fig)
    fig.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return inline(file.getvalue(), slug, alt, {value: f"var(--{name})" for name, value in COLOURS.items()})


CRISP = "crisp"  # the id of shapes whose edges must not be smoothed
HOVER = "hover:"  # how the id of shapes begins that tell something to a pointer


def inline(text: str, slug: str, alt: str, colours: Mapping[str, str]) -> str:
    """`colours` says what each placeholder becomes. Works on the parsed tree, so names in the text stay as they are."""
    root = ET.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):  # its style element would rule the whole page
                parent.remove(child)
    used = {
        name
        for element in root.iter()
        for key, value in element.attrib.items()
        if _local(key) != "id"
        for name in re.findall(r"#([\w.-]+)", value)
    }
    pattern = re.compile("|".join(map(re.escape, colours)))
    for element in list(root.iter()):
        element.tag = _local(element.tag)
        if (said := element.get("id", "")).startswith(HOVER):
            ET.SubElement(element, "title").text = said.removeprefix(HOVER)
        if element.tag != "text":
            element.text = None
        element.tail = None
        element.attrib = dict(
            pair
            for key, value in element.attrib.items()
            if (pair := _attribute(_local(key), value, slug, used)) is not None
        )
        if "style" in element.attrib:
            element.attrib["style"] = pattern.sub(lambda m: colours[m[0]], element.attrib["style"])
    _prune(root)
    box = root.attrib["viewBox"]
    _, _, width, height = box.split()
    root.attrib = {"viewBox": box, "width": width, "height": height, "role": "img", "aria-label": alt}
    return ET.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, slug: str, used: set[str]) -> tuple[str, str] | None:
    if key == "id":
        if value == CRISP:
            return "shape-rendering", "crispEdges"
        return ("id", f"{slug}-{value}") if value in used else None
    if key == "transform" and re.match(r"rotate\(-?0 ", value):
        return None
    if key == "href":
        return key, f"#{slug}-{value[1:]}"
    if key == "clip-path":
        return key, value.replace("url(#", f"url(#{slug}-")
    if key == "style":
        return key, re.sub(r"font-family: [^;]+;?\s*", "", value)
    if key in ("d", "x", "y", "width", "height", "transform"):
        return key, _shorter(value)
    return key, value


def _prune(element: ET.Element) -> None:
    for child in list(element):
        _prune(child)
        if child.tag in ("g", "defs") and not len(child):
            element.remove(child)


def _shorter(numbers: str) -> str:
    """Hundredths of a pixel are enough."""
    rounded = re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), numbers)
    return " ".join(rounded.split())


def _local(name: str) -> str:
    return name.rpartition("}")[2]
