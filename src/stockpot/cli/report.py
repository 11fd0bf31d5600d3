"""`stockpot report`: the HTML and Markdown report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stockpot.cli.failures import guarded
from stockpot.cli.options import Json

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]


@guarded
def report(run: Run, as_json: Json = False) -> None:
    """Write the report of a run again, and print its table.

    Examples:

    ```
    stockpot report run
    stockpot report run --json
    ```
    """
    from stockpot.cli.ending import print_table, written_report
    from stockpot.cli.shell import document, say, shown
    from stockpot.report import summary_rows

    path = written_report(run)
    if as_json:
        document({"report": str(path), "markdown": str(path.with_suffix(".md"))})
        return
    print_table(run)
    if (kinds := {row.kind for row in summary_rows(run)}) and "report" not in kinds:
        say("Scores on fitting data, which methods decide with: report data was not looked at.")
        say()
    say(f"Report: {shown(path)}  (and {path.with_suffix('.md').name})")
