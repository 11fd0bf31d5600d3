"""From class names or numbers to the numbers of the head, the same for every split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stockpot.adapters.data.columns import Column, Table
from stockpot.errors import DataError, describe
from stockpot.events import Event, Listener, ignore

DEFAULTS = ("label", "labels", "y", "target")
_SHOWN = 8


def label_name(table: Table, given: str | None) -> str:
    """The label column: the given one, or the first usual name that is there."""
    if given is None:
        given = next((name for name in DEFAULTS if name in table.columns), DEFAULTS[0])
    table.column(given, "data.label")
    return given


def encode(
    columns: Mapping[str, Column],
    *,
    classes: Sequence[str] | None = None,
    model_names: Sequence[str] | None = None,
    listen: Listener = ignore,
) -> dict[str, np.ndarray[Any, Any]]:
    """Labels of each split as int64, one class order for all of them; `listen` is told of one that nobody gave."""
    if all(isinstance(column, np.ndarray) for column in columns.values()) and classes is None:
        return {split: _numbers(split, column) for split, column in columns.items()}
    texts = {split: [_text(value) for value in column] for split, column in columns.items()}
    seen = sorted({value for column in texts.values() for value in column})
    if classes is None and all(_is_whole(value) for value in seen):
        return {split: np.array([int(v) for v in column], dtype=np.int64) for split, column in texts.items()}
    if classes is None:
        known = model_names is not None and set(seen) <= set(model_names)
        classes = model_names if model_names is not None and known else seen
        if not known:
            listen(Event("classes", {"names": seen}))
    number = {name: index for index, name in enumerate(classes)}
    for split, column in texts.items():
        for row, value in enumerate(column):
            if value not in number:
                more = ", ..." if len(number) > _SHOWN else ""
                raise DataError(
                    describe(
                        f"{split} data, row {row}",
                        expected=f"one of the classes {', '.join(list(number)[:_SHOWN])}{more}",
                        found=f"label {value!r}",
                        fix="correct data.classes or the label",
                    )
                )
    return {split: np.array([number[v] for v in column], dtype=np.int64) for split, column in texts.items()}


def _numbers(split: str, column: Column) -> np.ndarray[Any, Any]:
    array = np.asarray(column)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    whole = array.dtype.kind in "biu" or (array.dtype.kind == "f" and bool(np.all(array == np.floor(array))))
    if array.ndim != 1 or not whole:
        raise DataError(
            describe(
                f"labels of the {split} data",
                expected="one whole number or class name per sample",
                found=f"{array.dtype} values of shape {array.shape}",
                fix="name the right column in data.label; for other targets use data.python with data.loss",
            )
        )
    return array.astype(np.int64)


def _text(value: Any) -> str:
    return str(value).strip()


def _is_whole(value: str) -> bool:
    return value.removeprefix("-").isdecimal()
