"""The short version for a README: verdict, table, and how to get it again."""

from __future__ import annotations

import re

from stockpot.report.page import Page
from stockpot.report.rows import HEADINGS


def markdown(page: Page) -> str:
    lines = [f"# {escape(page.title)}", "", escape(page.subtitle), ""]
    lines += [f"> {escape(notice)}\n" for notice in page.notices]
    lines += [f"**{escape(page.verdict)}**", ""]
    if page.rows:
        lines += [
            "| " + " | ".join(HEADINGS) + " |",
            "|---|" + "---:|" * (len(HEADINGS) - 1),
            *(_row(row.cells(), bold=row.recommended and len(page.rows) > 1) for row in page.rows),
            "",
            f"Scores are on {page.data}. Differences are paired sample by sample, with their 95 % interval.",
            "",
        ]
    lines += [*(f"- {escape(name)}: {escape(note)}" for name, note in page.notes), ""] if page.notes else []
    if page.guard_summary:
        lines += [escape(page.guard_summary), ""]
    if page.command:
        lines += ["To get this again:", "", _fenced(page.command, "sh"), ""]
    if page.version:
        lines += [f"Made by stockpot {escape(page.version)}.", ""]
    return "\n".join(lines)


def _row(cells: tuple[str, ...], *, bold: bool) -> str:
    shown = [escape(cell) for cell in cells]
    if bold:
        shown[:2] = [f"**{cell}**" for cell in shown[:2]]
    return "| " + " | ".join(shown) + " |"


def escape(text: str) -> str:
    """Names are anybody's: nothing in them may become markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$&])", r"\\\1", " ".join(text.split()))


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
