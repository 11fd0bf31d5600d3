"""Named columns of equal length: what every format is read into before it becomes tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stockpot.errors import DataError, describe

# An array of numbers with samples first, or a list: texts, image paths, encoded images.
Column = np.ndarray[Any, Any] | list[Any]


@dataclass(frozen=True)
class Table:
    """`where` names the file or folder in errors."""

    where: str
    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                describe(
                    self.where,
                    expected="columns of one length",
                    found=", ".join(f"{name}: {n}" for name, n in lengths.items()),
                    fix="make them one row per sample",
                )
            )

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def column(self, name: str, key: str) -> Column:
        """The column, or an error that lists those there are; `key` is where the recipe names it."""
        if name not in self.columns:
            raise DataError(
                describe(
                    f"{key}: {name}",
                    expected=f"a column of {self.where}",
                    found=f"columns {', '.join(self.columns)}" if self.columns else "no columns",
                    fix=f"set {key} to one of them",
                )
            )
        return self.columns[name]

    def take(self, rows: np.ndarray[Any, Any]) -> Table:
        return Table(self.where, {name: pick(column, rows) for name, column in self.columns.items()})


def pick(column: Column, rows: Sequence[int] | np.ndarray[Any, Any]) -> Column:
    if isinstance(column, np.ndarray):
        return column[rows]
    return [column[int(row)] for row in rows]


def not_there(
    what: str, expected: str, fix: str = "check the path; it is relative to the recipe"
) -> DataError:
    return DataError(describe(what, expected=expected, found="nothing there", fix=fix))
