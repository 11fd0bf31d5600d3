"""jinja2's edge: a page becomes one self-contained HTML file."""

from __future__ import annotations

from importlib.resources import files

from stockpot.errors import RunError, describe
from stockpot.report.page import Page


def html(page: Page) -> str:
    """Everything is escaped except the charts, which are made of escaped text already."""
    try:
        import jinja2
    except ImportError as error:
        raise RunError(
            describe(
                "library jinja2",
                expected="an installed one, for the page of a report",
                found="none",
                fix="pip install 'stockpot[cli]'",
            )
        ) from error
    folder = files("stockpot.report") / "templates"
    names = [file.name for file in folder.iterdir() if file.name.endswith((".j2", ".css"))]
    sources = {name: (folder / name).read_text("utf-8") for name in names}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(sources),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = sources["report.css"]
    return environment.get_template("report.html.j2").render(page=page, css=css) + "\n"
