"""A run, told to people: one HTML page, its Markdown version, and the table's rows.

Reads run records only; plotting and templates are loaded when a report is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stockpot.report.tables import summary_rows
    from stockpot.report.write import write_report

__all__ = ["summary_rows", "write_report"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    homes = {"summary_rows": "tables", "write_report": "write"}
    if name in homes:
        return getattr(import_module(f"stockpot.report.{homes[name]}"), name)
    raise AttributeError(f"module 'stockpot.report' has no attribute {name!r}")
