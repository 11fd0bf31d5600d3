"""Writing to the terminal: rich where there is one, plain lines without control characters where there is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def harmless(text: str) -> str:
    """Names come from files of strangers: what could steer a terminal or hide text is shown as its code instead."""
    return "".join(char if char.isprintable() or char in "\n\t" else _code(char) for char in text)


def _code(char: str) -> str:
    return char.encode("unicode_escape").decode()


def say(text: str = "") -> None:
    print(harmless(text))


def note(text: str) -> None:
    """For people only: kept out of what a program reads from stdout."""
    print(harmless(text), file=sys.stderr)


def document(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    print("".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, marked: int | None = None) -> None:
    """First column to the left, the rest to the right; row `marked` stands out."""
    rows = [[harmless(cell).replace("\n", "\\n") for cell in row] for row in rows]
    if not sys.stdout.isatty():
        _plain(headings, rows, marked)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(
        box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for number, heading in enumerate(headings):
        drawn.add_column(heading, justify="right" if number else "left", overflow="fold")
    for number, row in enumerate(rows):
        # Text, not str: names come from files and may look like markup.
        drawn.add_row(*(Text(cell) for cell in row), style="bold green" if number == marked else None)
    Console().print(drawn)


def _plain(headings: Sequence[str], rows: Sequence[Sequence[str]], marked: int | None) -> None:
    widths = [max(len(line[i]) for line in (headings, *rows)) for i in range(len(headings))]
    for number, line in enumerate((headings, *rows)):
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        star = "*" if marked is not None and number == marked + 1 else " "
        print(f"{star} {'  '.join(cells)}".rstrip())


def shown(path: Path) -> str:
    """Relative to here where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
