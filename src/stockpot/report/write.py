"""The report's files, written beside the run they describe."""

from __future__ import annotations

from pathlib import Path

from stockpot import atomic
from stockpot.report.html import html
from stockpot.report.markdown import markdown
from stockpot.report.page import page_of
from stockpot.report.record import read

HTML, MARKDOWN = "report.html", "report.md"


def write_report(run_dir: Path) -> Path:
    """report.html and report.md from the record alone; the same record gives the same bytes."""
    page = page_of(read(run_dir))
    atomic.write_bytes(run_dir / MARKDOWN, markdown(page).encode())
    atomic.write_bytes(run_dir / HTML, html(page).encode())
    return run_dir / HTML
