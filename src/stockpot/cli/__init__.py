"""The command line: the only place that exits, and with progress the only one that prints."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        import rich  # noqa: F401  (typer draws help with it)
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"stockpot: the command line needs {error.name}\n  Fix: pip install 'stockpot[cli]'.")
    from stockpot.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter is no reason to fail
    app(prog_name="stockpot")
