"""Data in the formats people have it: each read by its own file into one kind of table."""

from stockpot.adapters.data.columns import Table
from stockpot.adapters.data.read import DataSource, read_splits
from stockpot.adapters.data.splits import Share
from stockpot.adapters.data.tensors import Columns

__all__ = ["Columns", "DataSource", "Share", "Table", "read_splits"]
