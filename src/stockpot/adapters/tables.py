"""CSV, TSV, JSONL and Parquet files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from stockpot.adapters.data import arrow
from stockpot.adapters.data.columns import Column, Table, not_there
from stockpot.errors import DataError, describe

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")


def read(path: Path, part: str | None) -> Table:
    file = _file(path, part)
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return arrow.read_parquet(file)
    try:
        if suffix in (".jsonl", ".ndjson"):
            return Table(str(file), _jsonl(file))
        return Table(str(file), _csv(file, "\t" if suffix == ".tsv" else ","))
    except UnicodeDecodeError as error:
        raise DataError(
            describe(str(file), expected="UTF-8 text", found=str(error), fix="save the file as UTF-8")
        ) from error


def _file(path: Path, part: str | None) -> Path:
    place = path if part is None else path / part
    if place.is_file():
        if place.suffix.lower() in SUFFIXES:
            return place
        raise DataError(
            describe(
                str(place),
                expected=f"a file ending in {', '.join(SUFFIXES)}",
                found=place.suffix or "no ending",
                fix="convert or rename it",
            )
        )
    if part is not None:
        for suffix in SUFFIXES:
            if (named := path / f"{part}{suffix}").is_file():
                return named
    if path.is_dir():
        known = sorted(f.name for f in path.iterdir() if f.suffix.lower() in SUFFIXES)
        if part is None and len(known) == 1:
            return path / known[0]
        raise DataError(
            describe(
                str(place),
                expected="one table",
                found=f"a folder with {', '.join(known)}" if known else "a folder without tables",
                fix="name one of them as the split, such as fit: val.csv",
            )
        )
    if path.is_file():
        raise DataError(
            describe(
                f"part {part!r}",
                expected=f"a file in a folder, but {path} is one file",
                found="no parts in it",
                fix="set data.table to the folder, or use fractions for the splits",
            )
        )
    raise not_there(str(place), "a CSV, TSV, JSONL or Parquet file")


def _csv(file: Path, delimiter: str) -> dict[str, Column]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.reader(stream, delimiter=delimiter)
        try:
            names = next(rows, [])
            content = [row for row in rows if row]
        except csv.Error as error:
            raise DataError(
                describe(
                    f"{file}, line {rows.line_num}", expected="CSV", found=str(error), fix="correct the line"
                )
            ) from error
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataError(
            describe(
                f"{file}, first line",
                expected="column names, each once",
                found=f"{', '.join(twice)} twice",
                fix="rename them",
            )
        )
    for number, row in enumerate(content, start=2):
        if len(row) != len(names):
            raise DataError(
                describe(
                    f"{file}, row {number}",
                    expected=f"{len(names)} values, as many as column names",
                    found=str(len(row)),
                    fix="correct the row; put quotes around text with delimiters",
                )
            )
    return {name: [row[index] for row in content] for index, name in enumerate(names)}


def _jsonl(file: Path) -> dict[str, Column]:
    records: list[dict[str, Any]] = []
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    describe(
                        f"{file}, line {number}", expected="JSON", found=str(error), fix="correct the line"
                    )
                ) from error
            if not isinstance(record, dict) or (records and set(record) != set(records[0])):
                wanted = f"an object with {', '.join(records[0])}" if records else "an object"
                found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise DataError(
                    describe(f"{file}, line {number}", expected=wanted, found=found, fix="correct the line")
                )
            records.append(record)
    names = list(records[0]) if records else []
    return {name: _column([record[name] for record in records]) for name in names}


def _column(values: list[Any]) -> Column:
    """An array where values are numbers, or lists of numbers of one length."""
    if any(isinstance(v, (str, bytes, dict)) or v is None for v in values):
        return values
    try:
        array = np.array(values)
    except ValueError:  # lists of different lengths
        return values
    return array if array.dtype.kind in "biuf" else values
