"""Named columns of equal length, which every format is read into, and the limits that all readers keep to.

CSV, TSV and JSONL are read here; Parquet in `binary`, which builds on this file.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stockpot.errors import DataError
from stockpot.files import parse_json

# An array of numbers with samples first, or a list: texts, image paths, encoded images.
Array = np.ndarray[Any, Any]
Column = Array | list[Any]

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".txt")  # the last may lie beside a table as a note
_INFLATION = 100  # Times its size that any file may unfold to: data worth having does not shrink a thousandfold.


@dataclass(frozen=True)
class Limits:
    """What one file of a stranger may hold; a recipe raises it in `data.limits`."""

    rows: int = 10_000_000
    pixels: int = 2**26  # of one image, as it is stored and as it is resized
    bytes: int = 2**26  # that a compressed file may unfold to beyond a hundred times its size

    def check_rows(self, where: object, rows: int) -> None:
        if rows > self.rows:
            fix = f"raise data.limits.rows to {rows} if you trust the file"
            raise bad_data(where, f"at most {self.rows:,} rows", f"{rows:,}", fix)

    def unfolded(self, path: Path) -> int:
        """How many bytes the file may hold once nothing in it is compressed or shared."""
        return max(_INFLATION * path.stat().st_size, self.bytes)

    def check_unfolded(self, path: Path, needed: int) -> None:
        if needed > self.unfolded(path):
            expected = f"content of at most {self.unfolded(path):,} bytes in a file of {path.stat().st_size:,}"
            fix = f"raise data.limits.bytes to {2 ** math.ceil(math.log2(needed))} if you trust the file"
            raise bad_data(path, expected, f"at least {needed:,}", fix)


LIMITS = Limits()


def bad_data(what: object, expected: str, found: str, fix: str) -> DataError:
    return DataError.of(str(what), expected=expected, found=found, fix=fix)


def not_there(what: object, expected: str) -> DataError:
    return bad_data(what, expected, "nothing there", "check the path; it is relative to the recipe")


def first_line(error: Exception) -> str:
    """What a library said, without its surprise: that something else was expected we say ourselves."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return re.sub(r"unexpected(ly)? ", "", line, flags=re.IGNORECASE)


@dataclass(frozen=True)
class Table:
    """Columns of one length, or the given rows of them; `where` names the file or folder in errors."""

    where: str
    columns: Mapping[str, Column]
    rows: Array | None = None

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name}: {n}" for name, n in lengths.items())
            raise bad_data(self.where, "columns of one length", found, "make them one row per sample")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def column(self, name: str, key: str) -> Column:
        """The column, or an error that lists those there are; `key` is where the recipe names it."""
        if name not in self.columns:
            known = f"columns {', '.join(self.columns)}" if self.columns else "no columns"
            fix = f"set {key} to one of them"
            if key == "data.group":  # a second set of report data, of another source
                fix += ", or add it to that file, with a number of its own in each row if samples are independent"
            raise bad_data(f"{key}: {name}", f"a column of {self.where}", known, fix)
        column = self.columns[name]
        if self.rows is None:
            return column
        return column[self.rows] if isinstance(column, np.ndarray) else [column[row] for row in self.rows.tolist()]

    def texts(self, name: str, key: str) -> list[str]:
        return [as_text(cell, self.cell(name, key, row)) for row, cell in enumerate(self.column(name, key))]

    def numbers(self, name: str, key: str) -> Array:
        return as_numbers(self.column(name, key), f"{key}: {name}", lambda row: self.cell(name, key, row))

    def number(self, row: int) -> int:
        """Where a row of this share is in the file."""
        return row if self.rows is None else int(self.rows[row])

    def cell(self, name: str, key: str, row: int) -> str:
        return f"{key}: {name}, row {self.number(row)} (from 0) of {self.where}"


def is_missing(value: Any) -> bool:
    """Whether a library wrote that there is nothing: None, or the NaN of a table of texts."""
    return value is None or (isinstance(value, float) and value != value)


def as_text(value: Any, where: str) -> str:
    """Text is never made up: nothing stays nothing, and bytes are UTF-8 or refused."""
    if is_missing(value):
        raise bad_data(where, "text", "nothing", "fill it in or remove the row")
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise bad_data(where, "UTF-8 text", f"bytes {value[:8].hex(' ')}", "save it as UTF-8") from error
    if isinstance(value, (str, bool, int, float, np.generic)):
        if not (text := str(value)).isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                fix = "correct what it was escaped as (\\ud83d alone is no letter)"
                raise bad_data(where, "text", f"half of a letter, {text[error.start]!a}", fix) from error
        return text
    raise bad_data(where, "text", type(value).__name__, "name a column of texts")


def as_numbers(column: Column, what: str, where: Callable[[int], str]) -> Array:
    """An array of numbers; `where` names the row of the first cell that is none."""
    fix = "name a column of numbers, or fill in what is missing"
    if isinstance(column, np.ndarray):
        if column.dtype.kind not in "biuf":
            raise bad_data(what, "numbers", str(column.dtype), fix)
        return column
    for row, value in enumerate(column):
        try:
            is_number = not is_missing(value) and "_" not in str(value) and bool(np.asarray(value, np.float64).size)
        except (TypeError, ValueError, OverflowError):
            is_number = False
        if not is_number:
            raise bad_data(where(row), "numbers", "nothing" if is_missing(value) else repr(value)[:80], fix)
    try:
        return np.asarray(column, dtype=np.float64)
    except ValueError as error:
        raise bad_data(what, "as many numbers in every row", "rows of different lengths", fix) from error


def read_table(path: Path, part: str | None, limits: Limits = LIMITS) -> Table:
    from stockpot.adapters.binary import read_parquet

    place = path if part is None else path / part
    if texts := _folder_of_texts(place):
        limits.check_rows(place, len(texts))
        return Table(str(place), {"text": [_text(file) for file in texts], "file": [file.name for file in texts]})
    file = _file(path, part)
    suffix = file.suffix.lower()
    try:
        if suffix == ".parquet":
            return Table(str(file), read_parquet(file, limits))
        if suffix in (".jsonl", ".ndjson"):
            return Table(str(file), _jsonl(file, limits))
        if suffix == ".txt":
            return Table(str(file), {"text": [_text(file)]})
        return Table(str(file), _csv(file, "\t" if suffix == ".tsv" else ",", limits))
    except UnicodeDecodeError as error:
        raise bad_data(file, "UTF-8 text", first_line(error), "save the file as UTF-8") from error


def _folder_of_texts(place: Path) -> list[Path]:
    """The documents of a folder that has several `.txt` files, or one, and no other table."""
    if not place.is_dir():
        return []
    found = sorted(file for file in place.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    return found if all(file.suffix.lower() == ".txt" for file in found) else []


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_data(file, "UTF-8 text", first_line(error), "save the file as UTF-8") from error


def documents(table: Table, separator: str, limits: Limits = LIMITS) -> Table:
    """The texts of `.txt` files cut where documents end; blank ones are dropped."""
    if not (table.where.lower().endswith(".txt") or Path(table.where).is_dir()):
        fix = "remove it: in other tables each row is a document"
        raise bad_data("data.separator", "a .txt file or a folder of them", f"the table {table.where}", fix)
    limits.check_rows(table.where, sum(text.count(separator) + 1 for text in table.columns["text"]))
    texts = [part for text in table.columns["text"] for part in text.split(separator) if part.strip()]
    return Table(table.where, {"text": texts})


def _file(path: Path, part: str | None) -> Path:
    place = path if part is None else path / part
    if place.is_file():
        if place.suffix.lower() in SUFFIXES:
            return place
        expected = f"a file ending in {', '.join(SUFFIXES)}"
        raise bad_data(place, expected, place.suffix or "no ending", "convert or rename it")
    for suffix in SUFFIXES if part is not None else ():
        if (named := path / f"{part}{suffix}").is_file():
            return named
    if path.is_dir():
        known = sorted(f.name for f in path.iterdir() if f.suffix.lower() in SUFFIXES[:-1] and f.is_file())
        if part is None and len(known) == 1:
            return path / known[0]
        found = f"a folder with {', '.join(known)}" if known else "a folder without tables"
        raise bad_data(place, "one table", found, "name one of them as the split, such as fit: val.csv")
    if path.is_file():
        fix = "set data.table to the folder, or use fractions for the splits"
        raise bad_data(f"part {part!r}", f"a file in a folder, but {path} is one file", "no parts in it", fix)
    raise not_there(place, "a CSV, TSV, JSONL, Parquet or .txt file")


def _csv(file: Path, delimiter: str, limits: Limits) -> dict[str, Column]:
    columns: list[list[str]] = []
    count = 0
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.reader(stream, delimiter=delimiter)
        try:
            names = next(rows, [])
            if twice := [name for name, times in Counter(names).items() if times > 1]:
                found = f"{', '.join(sorted(twice))} twice"
                raise bad_data(f"{file}, first line", "column names, each once", found, "rename them")
            columns = [[] for _ in names]
            for row in filter(None, rows):
                if len(row) != len(names):
                    where, fix = f"{file}, row {count + 2}", "correct the row; put quotes around text with delimiters"
                    raise bad_data(where, f"{len(names)} values, as many as column names", str(len(row)), fix)
                for column, cell in zip(columns, row, strict=True):
                    column.append(cell)
                count += 1
                limits.check_rows(file, count)
        except csv.Error as error:
            raise bad_data(f"{file}, line {rows.line_num}", "CSV", str(error), "correct the line") from error
    return dict(zip(names, columns, strict=True))


def _jsonl(file: Path, limits: Limits) -> dict[str, Column]:
    records: list[dict[str, Any]] = []
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                record = parse_json(line)
            except ValueError as error:
                raise bad_data(where, "JSON", first_line(error), "correct the line") from error
            if not isinstance(record, dict) or (records and set(record) != set(records[0])):
                wanted = f"an object with {', '.join(records[0])}" if records else "an object"
                found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise bad_data(where, wanted, found, "correct the line")
            records.append(record)
            limits.check_rows(file, len(records))
    return {name: _numbers_or_list([record[name] for record in records]) for name in (records[0] if records else ())}


def _numbers_or_list(values: list[Any]) -> Column:
    """An array where values are numbers, or lists of numbers of one length."""
    if any(isinstance(v, (str, dict)) or v is None for v in values):
        return values
    try:
        array = np.array(values)
    except (ValueError, OverflowError):  # lists of different lengths, or numbers that no type holds
        return values
    return array if array.dtype.kind in "biuf" else values
