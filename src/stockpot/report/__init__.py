"""A run, told to people: one HTML page, its Markdown version, and the table's rows, from its record alone."""

from stockpot.report.page import write_report
from stockpot.report.reading import summary_rows

__all__ = ["summary_rows", "write_report"]
