"""The report's files, written beside the run they describe: one HTML page and its short Markdown version."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from stockpot import files
from stockpot.errors import RunError
from stockpot.report.page import page_of
from stockpot.report.reading import Run
from stockpot.table import as_markdown
from stockpot.words import escaped

HTML, MARKDOWN = "report.html", "report.md"


def write_report(run_dir: Path) -> Path:
    """report.html and report.md from the record alone; the same record gives the same bytes. The soup's card gets the
    table of scores."""
    page = page_of(Run(run_dir))
    files.write_bytes(run_dir / MARKDOWN, markdown(page).encode(), root=run_dir)
    files.write_bytes(run_dir / HTML, html(page).encode(), root=run_dir)
    if page["soup"] and page["rows"]:
        from stockpot.soup.card import add_results  # with torch

        add_results(run_dir / page["soup"], "\n".join(as_markdown(page["rows"])), root=run_dir)
    return run_dir / HTML


def html(page: Mapping[str, Any]) -> str:
    """Everything is escaped except the charts, which are made of escaped text already."""
    try:
        import jinja2
    except ImportError as error:
        what = "an installed one, for the page of a report"
        raise RunError.of("library jinja2", expected=what, found="none", fix="pip install 'stockpot[cli]'") from error
    folder = package_files("stockpot.report") / "templates"
    names = [file.name for file in folder.iterdir() if file.name.endswith((".j2", ".css", ".js"))]
    sources = {name: (folder / name).read_text("utf-8") for name in names}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(sources),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css, script = sources["report.css"], sources["report.js"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment.get_template("report.html.j2")
    return template.render(page=page, css=css, script=script, digest=digest) + "\n"


def markdown(page: Mapping[str, Any]) -> str:
    lines = [f"# {escaped(page['decision'])}", "", f"{escaped(page['title'])} · {escaped(page['subtitle'])}", ""]
    lines += [f"> {escaped(notice)}\n" for notice in page["notices"]]
    lines += [escaped(page["why"]), ""] if page["why"] else []
    if page["keep"]:
        lines += ["{}, the best single model, is {}.".format(*map(escaped, page["keep"])), ""]
    if page["soup"]:
        lines += [f"The soup is in {escaped(page['soup'])}, in this directory. To load it:", ""]
        lines += [_fenced(page["loading"], "python"), ""]
    lines += [*as_markdown(page["rows"]), ""] if page["rows"] else []
    lines += [*(f"- {escaped(name)}: {escaped(note)}" for name, note in page["notes"]), ""] if page["notes"] else []
    if page["guard_summary"]:
        lines += [escaped(page["guard_summary"]), ""]
    if page["command"]:
        lines += ["To get this again:", "", _fenced(page["command"], "sh"), ""]
    return "\n".join([*lines, f"Made by stockpot {escaped(page['version'])}.", ""])


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
