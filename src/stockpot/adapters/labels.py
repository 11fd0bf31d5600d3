"""From labels in files to the targets of a loss. Nothing is guessed: what is not plain is refused with its row.

Classes are whole numbers (also written as 3.0), names that the recipe or the model gives an order, or names alone,
which are sorted and told. One odd cell among them never renumbers the others. Numbers to predict and several classes
per sample are targets only where the recipe says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stockpot import words
from stockpot.adapters.tables import Array, Column, Table, as_numbers, as_text, bad_data, is_missing
from stockpot.errors import DataError
from stockpot.events import Event, Listener, ignore
from stockpot.task.loss import IGNORED

DEFAULTS = ("label", "labels", "y", "target")
_MISSING = frozenset(["", "NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "-nan", "-NaN", "NULL", "null", "None"])
_LARGEST = 2**31  # No head has so many classes.
_SHOWN = 8
_OTHER = "correct the label, or list the labels in data.classes in the order of the head"
_FILL = "fill it in or remove the row"


def label_column(table: Table, given: str | Sequence[str] | None) -> Column:
    """The labels: the given column, several side by side, or the first usual name that is there."""
    if given is not None and not isinstance(given, str):
        return np.stack([table.numbers(name, "data.label") for name in given], axis=1)
    name = given or next((name for name in DEFAULTS if name in table.columns), DEFAULTS[0])
    return table.column(name, "data.label")


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
    if target != "class":
        names = classes if classes is not None else model_names
        read = {s: _numbers(s, c) if target == "number" else _several(s, c, names) for s, c in columns.items()}
        for split, array in read.items():
            width = 1 if array.ndim == 1 else array.shape[1]
            if head is not None and width != head:
                expected = f"{head} per sample, as many as the model has outputs"
                fix = "name other columns in data.label, or the model that was trained for them; or check data.target"
                raise bad_data(f"labels of the {split} data", expected, str(width), fix)
        return read
    cells = {split: _cells(split, column) for split, column in columns.items()}
    first: dict[str, tuple[str, int]] = {}  # label: the split and row it is met in first
    for split, texts in cells.items():
        for row, text in enumerate(texts):
            first.setdefault(text, (split, row))
    number = _known(first, classes, model_names)
    if number is None:
        count = Counter(text for texts in cells.values() for text in texts)
        _refuse_mixture(first, count)
        if head is not None and len(first) != head:  # sorted, one name too many or too few moves the others
            rare = sorted(first, key=count.__getitem__)[:_SHOWN]
            rarest = ", ".join(repr(words.middle(label, 30)) for label in rare)
            fix = "list all classes in data.classes in the order of the head, and correct labels that are none of them"
            if 2 * len(first) > count.total():
                fix = "set data.label to the column of labels: in this one hardly two rows are alike"
            expected = f"the names of all {head} classes of the model"
            raise bad_data("labels", expected, f"{len(first)}, the rarest of them {rarest}", fix)
        listen(Event("classes", {"names": sorted(first)}))
        number = {label: index for index, label in enumerate(sorted(first))}
    return {split: np.array([number[text] for text in texts], dtype=np.int64) for split, texts in cells.items()}


def _cells(split: str, column: Column) -> list[str]:
    """Every label as text, nothing as an empty one."""
    if isinstance(column, np.ndarray):
        column = _squeezed(column)
        if column.ndim != 1 or column.dtype.kind not in "biuf":
            fix = "name the right column in data.label, or write data.target: multi if each row marks its classes with "
            fix += "0 and 1; for other targets use data.python with data.loss"
            raise _odd_column(split, "one whole number or class name per sample", column, fix)
        column = (column.astype(np.int64) if column.dtype.kind == "b" else column).tolist()
    cells = []
    for row, value in enumerate(column):
        if isinstance(value, (list, dict)):
            fix = "write data.target: multi if a sample has several classes, or name another column in data.label"
            raise _odd(split, row, "one class", type(value).__name__, fix)
        cells.append("" if is_missing(value) else as_text(value, _where(split, row)).strip())
    return cells


def _known(
    first: Mapping[str, tuple[str, int]], classes: Sequence[str] | None, model_names: Sequence[str] | None
) -> dict[str, int] | None:
    """The class of every label where numbers or given names say it; None where there are names alone."""
    whole = {label: number for label in first if (number := _whole(label)) is not None}
    names = classes if classes is not None else model_names
    if classes is None and not any(label in (model_names or ()) for label in first):
        if len(whole) == len(first):
            for label, number in whole.items():
                if number < 0:
                    raise _odd(*first[label], "a class number, counted from 0", repr(label), _OTHER)
            return whole
        if all(re.fullmatch(r"LABEL_\d{1,9}", label) for label in first):  # what transformers calls them
            return {label: int(label.removeprefix("LABEL_")) for label in first}
    if names is None:
        return None
    known = {name: index for index, name in enumerate(names)}
    if len(known) < len(names):
        raise bad_data("data.classes", "every class once", ", ".join(names)[:200], "remove what is there twice")
    found: dict[str, int] = {}
    for label, place in first.items():
        plain = str(whole[label]) if label in whole and label not in known else label  # 3.0 for a class named 3
        if plain not in known:
            own, more = "" if classes is not None else "of the model ", ", ..." if len(known) > _SHOWN else ""
            expected = f"one of the classes {own}{', '.join(names[:_SHOWN])}{more}"
            raise _odd(*place, expected, f"label {label!r}", _OTHER)
        found[label] = known[plain]
    return found


def _refuse_mixture(first: Mapping[str, tuple[str, int]], count: Mapping[str, int]) -> None:
    """Names alone are classes. Names with a number or a gap among them are a mistake in the file, or not classes."""
    for label, place in first.items():
        if label in _MISSING:
            fix = f"{_FILL}; if it is a class, list all classes in data.classes"
            raise _odd(*place, "a class", f"label {label!r}" if label else "nothing", fix)
    numbers = {label for label in first if _number(label) is not None}
    if len(numbers) == len(first):
        label = next(label for label in first if _whole(label) is None)
        fix = "write data.target: number if numbers are to be predicted, or name another column in data.label"
        raise _odd(*first[label], "a class: a whole number or a name", f"label {label!r}", fix)
    if numbers:
        few_names = 2 * sum(count[label] for label in numbers) >= sum(count.values())
        label = next(label for label in first if (label in numbers) != few_names)
        raise _odd(*first[label], f"a {'number' if few_names else 'name'} like most labels", f"label {label!r}", _OTHER)


def _numbers(split: str, column: Column) -> Array:
    """float32 (n,) or (n, d), finite."""
    array = _squeezed(as_numbers(column, f"labels of the {split} data", lambda row: _where(split, row)))
    if array.ndim > 2:
        expected = "one number or a list of numbers per sample"
        raise _odd_column(split, expected, array, "name another column in data.label")
    finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
    if not finite.all():
        row = int(np.argmin(finite))
        raise _odd(split, row, "a number", str(array[row]), _FILL)
    return array.astype(np.float32)


def _several(split: str, column: Column, names: Sequence[str] | None) -> Array:
    """float32 (n, C) of 0 and 1; names of the classes that apply are looked up."""
    lists = not isinstance(column, np.ndarray) and all(isinstance(cell, (list, tuple)) for cell in column)
    if lists and any(isinstance(name, str) for cell in column for name in cell):
        return _named(split, list(column), names)
    array = column if isinstance(column, np.ndarray) else np.array([type(cell).__name__ for cell in column])
    if array.ndim != 2 or array.dtype.kind not in "biuf" or not bool(np.isin(array, (0, 1)).all()):
        fix = "make it so, or give lists of names; or leave data.target out if a sample has one class"
        raise _odd_column(split, "a list of 0 and 1 per sample, one for each class", array, fix)
    return array.astype(np.float32)


def _named(split: str, column: Sequence[Any], names: Sequence[str] | None) -> Array:
    """From lists of names, such as [sport, politics], to float32 (n, C)."""
    number = {name: index for index, name in enumerate(names or ())}
    made = np.zeros((len(column), len(number)), np.float32)
    for row, cells in enumerate(column):
        for cell in cells:
            if cell not in number:
                known = f"one of the classes {', '.join(number)[:200]}" if number else "classes whose order is known"
                fix = "list all classes in data.classes in the order of the head, or correct the label"
                raise _odd(split, row, known, f"label {cell!r}", fix)
            made[row, number[cell]] = 1
    return made


def read_tags(
    table: Table,
    words: str,
    tags: str,
    names: Sequence[str] | None,
    model_names: Sequence[str] | None,
    head: int | None,
) -> tuple[list[list[str]], list[list[int]]]:
    """Words of each sample, and the class of each of them: a number, or one of the names; -100 is no label."""
    number = {name: index for index, name in enumerate(names or model_names or ())}
    found: tuple[list[list[str]], list[list[int]]] = ([], [])
    columns = table.column(words, "data.words"), table.column(tags, "data.tags")
    for row, (cells, given) in enumerate(zip(*columns, strict=True)):
        where = table.cell(words, "data.words", row)
        sentence = [as_text(cell, where) for cell in _in_list(cells, "words", where)]
        where = table.cell(tags, "data.tags", row)
        marks = _in_list(given, "tags", where)
        if len(marks) != len(sentence):
            raise bad_data(where, f"{len(sentence)} tags, one for each word", str(len(marks)), "correct the sample")
        found[0].append(sentence)
        found[1].append([_tag(mark, number, head, where) for mark in marks])
    return found


def _in_list(cell: Any, what: str, where: str) -> list[Any]:
    found = cell.tolist() if hasattr(cell, "tolist") else cell
    if not isinstance(found, (list, tuple)):
        fix = "write JSONL or Parquet, with a list of words and a list of tags per sample"
        raise bad_data(where, f"a list of {what}", repr(cell)[:80], fix)
    return [*found]


def _tag(mark: Any, number: dict[str, int], head: int | None, where: str) -> int:
    if isinstance(mark, int) and not isinstance(mark, bool):
        if mark == IGNORED or 0 <= mark < (head or 2**31):
            return mark
        expected = "tags from 0" if head is None else f"tags 0 to {head - 1}, the classes of the model"
        raise bad_data(where, expected, str(mark), "correct the tag, or use the model that knows it")
    if not number:
        fix = "list them in data.classes in the order of the head, or set id2label in the model's config.json"
        raise bad_data(where, "tags as numbers, or names whose order is known", repr(mark)[:80], fix)
    if not isinstance(mark, str) or mark not in number:
        expected = f"one of the tags {', '.join(number)[:200]}"
        raise bad_data(where, expected, repr(mark)[:80], "correct the tag, or list all of them in data.classes")
    return number[mark]


def _number(label: str) -> float | None:
    """What the text says if it is a number and nothing else; Python alone would also read 1_000."""
    try:
        return None if "_" in label else float(label)
    except ValueError:
        return None


def _whole(label: str) -> int | None:
    value = _number(label)
    return int(value) if value is not None and abs(value) < _LARGEST and value == int(value) else None


def _squeezed(array: Array) -> Array:
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _where(split: str, row: int) -> str:
    return f"{split} data, row {row} (from 0)"


def _odd(split: str, row: int, expected: str, found: str, fix: str) -> DataError:
    return bad_data(_where(split, row), expected, found[:120], fix)


def _odd_column(split: str, expected: str, array: Array, fix: str) -> DataError:
    return bad_data(f"labels of the {split} data", expected, f"{array.dtype} values of shape {array.shape}", fix)
