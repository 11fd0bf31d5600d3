"""From labels in files to the targets of a loss. Nothing is guessed: what is not plain is refused with its row.

Classes are whole numbers (also written as 3.0), names that the recipe or the model gives an order, or names alone,
which are sorted and told. One odd cell among them never renumbers the others. Numbers to predict and several classes
per sample are targets only where the recipe says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stockpot.adapters.tables import Array, Column, Table, as_text, bad_data, is_missing
from stockpot.errors import DataError
from stockpot.events import Event, Listener, ignore

DEFAULTS = ("label", "labels", "y", "target")
_MISSING = frozenset(("", "NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "-nan", "-NaN", "NULL", "null", "None"))
_LARGEST = 2**31  # No head has so many classes.
_SHOWN = 8
_OTHER = "correct the label, or list the labels in data.classes in the order of the head"
_FILL = "fill it in or remove the row"


def label_name(table: Table, given: str | None) -> str:
    """The label column: the given one, or the first usual name that is there."""
    if given is None:
        given = next((name for name in DEFAULTS if name in table.columns), DEFAULTS[0])
    table.column(given, "data.label")
    return given


def encode(
    columns: Mapping[str, Column],
    *,
    target: str = "class",
    classes: Sequence[str] | None = None,
    model_names: Sequence[str] | None = None,
    head: int | None = None,
    listen: Listener = ignore,
) -> dict[str, Array]:
    """Targets of each split: int64 (n,), or float32 (n,) for numbers and (n, C) for several classes per sample.

    One class order holds for all splits; `listen` is told of one that nobody gave. `head` is the number of classes the
    model has, where that is known.
    """
    if target == "number":
        return {split: _numbers(split, column) for split, column in columns.items()}
    if target == "multi":
        names = classes if classes is not None else model_names
        return {split: _several(split, column, names) for split, column in columns.items()}
    cells = {split: _cells(split, column) for split, column in columns.items()}
    first: dict[str, tuple[str, int]] = {}  # label: the split and row it is met in first
    count: dict[str, int] = {}
    for split, texts in cells.items():
        for row, text in enumerate(texts):
            first.setdefault(text, (split, row))
            count[text] = count.get(text, 0) + 1
    number = _numbering(first, count, classes, model_names, head, listen)
    return {s: np.array([number[text] for text in texts], dtype=np.int64) for s, texts in cells.items()}


def _cells(split: str, column: Column) -> list[str]:
    """Every label as text, nothing as an empty one."""
    if isinstance(column, np.ndarray):
        if column.ndim == 2 and column.shape[1] == 1:
            column = column[:, 0]
        if column.ndim != 1 or column.dtype.kind not in "biuf":
            raise bad_data(
                f"labels of the {split} data",
                "one whole number or class name per sample",
                f"{column.dtype} values of shape {column.shape}",
                "name the right column in data.label, or write data.target: multi if each row marks its classes "
                "with 0 and 1; for other targets use data.python with data.loss",
            )
        column = (column.astype(np.int64) if column.dtype.kind == "b" else column).tolist()
    cells = []
    for row, value in enumerate(column):
        if isinstance(value, (list, dict)):
            fix = "write data.target: multi if a sample has several classes, or name another column in data.label"
            raise _odd(split, row, "one class", type(value).__name__, fix)
        cells.append("" if is_missing(value) else as_text(value, _where(split, row)).strip())
    return cells


def _numbering(
    first: Mapping[str, tuple[str, int]],
    count: Mapping[str, int],
    classes: Sequence[str] | None,
    model_names: Sequence[str] | None,
    head: int | None,
    listen: Listener,
) -> dict[str, int]:
    """The class of every label there is, or the error for the first that has none."""
    named = model_names is not None and any(label in model_names for label in first)
    whole = {label: number for label in first if (number := _whole(label)) is not None}
    names = classes if classes is not None else model_names if named else None
    if names is None:
        if len(whole) == len(first):
            for label, number in whole.items():
                if number < 0:
                    raise _odd(*first[label], "a class number, counted from 0", repr(label), _OTHER)
            return whole
        if all(re.fullmatch(r"LABEL_\d{1,9}", label) for label in first):  # what transformers calls them
            return {label: int(label.removeprefix("LABEL_")) for label in first}
        names = model_names
    if names is None:
        _refuse_mixture(first, count)
        if head is not None and len(first) != head:  # sorted, one name too many or too few moves the others
            rare = sorted(first, key=lambda label: count[label])[:_SHOWN]
            raise bad_data(
                "labels",
                f"the names of all {head} classes of the model",
                f"{len(first)}, the rarest of them {', '.join(map(repr, rare))}"[:300],
                "list the classes in data.classes in the order of the head, and correct labels that are none of them",
            )
        listen(Event("classes", {"names": sorted(first)}))
        return {label: index for index, label in enumerate(sorted(first))}
    known = {name: index for index, name in enumerate(names)}
    if len(known) < len(names):
        raise bad_data("data.classes", "every class once", ", ".join(names)[:200], "remove what is there twice")
    found: dict[str, int] = {}
    for label, place in first.items():
        plain = str(whole[label]) if label in whole and label not in known else label  # 3.0 for a class named 3
        if plain not in known:
            more = ", ..." if len(known) > _SHOWN else ""
            own = "" if classes is not None else "of the model "
            fix = "correct the label or data.classes" if classes is not None else _OTHER
            raise _odd(*place, f"one of the classes {own}{', '.join([*known][:_SHOWN])}{more}", f"label {label!r}", fix)
        found[label] = known[plain]
    return found


def _refuse_mixture(first: Mapping[str, tuple[str, int]], count: Mapping[str, int]) -> None:
    """Names alone are classes. Names with a number or a gap among them are a mistake in the file, or not classes."""
    numbers = [label for label in first if _number(label) is not None]
    for label in first:
        if label in _MISSING:
            fix = "fill it in or remove the row; if it is a class, list all classes in data.classes"
            raise _odd(*first[label], "a class", f"label {label!r}" if label else "nothing", fix)
    if numbers and len(numbers) == len(first):
        label = next(label for label in first if _whole(label) is None)
        fix = "write data.target: number if numbers are to be predicted, or name another column in data.label"
        raise _odd(*first[label], "a class: a whole number or a name", f"label {label!r}", fix)
    if numbers:
        rows = sum(count[label] for label in numbers)
        names_are_odd = rows >= sum(count.values()) - rows
        label = next(label for label in first if (label in numbers) != names_are_odd)
        expected = f"a {'number' if names_are_odd else 'name'} like most labels"
        raise _odd(*first[label], expected, f"label {label!r}", _OTHER)


def _numbers(split: str, column: Column) -> Array:
    """float32 (n,) or (n, d), finite."""
    values: Any = column
    if not isinstance(column, np.ndarray):
        values = []
        for row, cell in enumerate(column):
            value = _number(cell) if isinstance(cell, str) else cell
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise _odd(split, row, "a number", "nothing" if is_missing(cell) else repr(cell), _FILL)
            values.append(float(value))
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype.kind not in "iuf" or array.ndim > 2:
        found = f"{array.dtype} values of shape {array.shape}"
        raise bad_data(f"labels of the {split} data", "numbers", found, "name another column in data.label")
    finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
    if not finite.all():
        row = int(np.argmin(finite))
        raise _odd(split, row, "a number", str(array[row]), _FILL)
    return array.astype(np.float32)


def _several(split: str, column: Column, names: Sequence[str] | None) -> Array:
    """float32 (n, C) of 0 and 1, from such an array or from lists of class names."""
    if isinstance(column, np.ndarray):
        if column.ndim == 2 and column.dtype.kind in "biuf" and bool(np.isin(column, (0, 1)).all()):
            return column.astype(np.float32)
        expected = "a list of 0 and 1 per sample, one for each class"
        found = f"{column.dtype} values of shape {column.shape}"
        fix = "correct the column, or leave data.target out if a sample has one class"
        raise bad_data(f"labels of the {split} data", expected, found, fix)
    if names is None:
        expected = "the names of all classes, because rows list theirs"
        raise bad_data("data.classes", expected, "none", "list them in the order of the head")
    number = {name: index for index, name in enumerate(names)}
    made = np.zeros((len(column), len(number)), dtype=np.float32)
    for row, cell in enumerate(column):
        if not isinstance(cell, (list, tuple)):
            raise _odd(split, row, "a list of classes", "nothing" if is_missing(cell) else repr(cell), _FILL)
        for value in cell:
            label = as_text(value, _where(split, row)).strip()
            if label not in number:
                shown = ", ".join([*number][:_SHOWN])
                raise _odd(split, row, f"classes out of {shown}", f"label {label!r}", _OTHER)
            made[row, number[label]] = 1
    return made


def _number(label: str) -> float | None:
    """What the text says if it is a number and nothing else; Python alone would also read 1_000."""
    try:
        return None if "_" in label else float(label)
    except ValueError:
        return None


def _whole(label: str) -> int | None:
    value = _number(label)
    return int(value) if value is not None and abs(value) < _LARGEST and value == int(value) else None


def _where(split: str, row: int) -> str:
    return f"{split} data, row {row} (from 0)"


def _odd(split: str, row: int, expected: str, found: str, fix: str) -> DataError:
    return bad_data(_where(split, row), expected, found[:120], fix)
