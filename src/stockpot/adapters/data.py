"""From a source and its splits to tensors for each split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stockpot.adapters.data import arrays, arrow, cifar, idx, image_folder, tables
from stockpot.adapters.data.columns import Table, pick
from stockpot.adapters.data.labels import encode, label_name
from stockpot.adapters.data.rows import read_rows
from stockpot.adapters.data.splits import Share, cut
from stockpot.adapters.data.tensors import Columns, Making, tensors
from stockpot.adapters.inputs import ImageInput, LoadedModel
from stockpot.errors import DataError, describe
from stockpot.events import Listener, ignore

_READERS = {
    "images": image_folder.read,
    "table": tables.read,
    "dataset": arrow.read_dataset,
    "arrays": arrays.read,
    "idx": idx.read,
    "cifar": cifar.read,
}


@dataclass(frozen=True)
class DataSource:
    """Where samples are and how they are divided; the adapters' side of a recipe's `data`."""

    kind: str
    path: Path
    columns: Columns
    shares: Mapping[str, Share]
    seed: int = 0
    classes: tuple[str, ...] | None = None
    max_length: int | None = None
    memory_limit: int = 8 * 2**30
    cache: Path | None = None  # folder for decoded images


def read_splits(
    source: DataSource,
    model: LoadedModel,
    image: ImageInput,
    wanted: Iterable[str],
    listen: Listener = ignore,
) -> dict[str, Any]:
    """Tensors of the wanted splits. All splits' labels are looked at, so that classes never depend on `wanted`."""
    parts = {share.part: _READERS[source.kind](source.path, share.part) for share in source.shares.values()}
    for table in parts.values():
        if len(table) == 0:
            raise DataError(describe(table.where, expected="samples", found="none", fix="check the file"))
    first = next(iter(parts.values()))
    labels: dict[str | None, Any] = {}
    if not (model.language and source.columns.label is None):
        chosen = {
            p: table.column(label_name(table, source.columns.label), "data.label")
            for p, table in parts.items()
        }
        named = {_called(source.shares, part): column for part, column in chosen.items()}
        encoded = encode(named, classes=source.classes, model_names=model.class_names, listen=listen)
        labels = {part: encoded[_called(source.shares, part)] for part in chosen}
    columns = source.columns.with_input_of(first)
    made: dict[str, Any] = {}
    for part, table in parts.items():
        shares = {name: share for name, share in source.shares.items() if share.part == part}
        listed = {name: read_rows(share.rows, table) for name, share in shares.items() if share.rows}
        rows = cut(len(table), labels.get(part), shares, source.seed, table.where, listed)
        for name in (n for n in wanted if n in rows):
            picked = labels[part][rows[name]] if part in labels else None
            making = Making(
                model,
                image,
                source.max_length,
                _image_folder(source.path, part),
                source.memory_limit,
                listen,
                source.cache,
            )
            made[name] = tensors(_only(table, columns, rows[name]), columns, picked, name, making)
    return made


def _called(shares: Mapping[str, Share], part: str | None) -> str:
    return " and ".join(name for name, share in shares.items() if share.part == part)


def _only(table: Table, columns: Columns, rows: Any) -> Table:
    """Take rows of the input columns alone; the rest of a wide table is not copied."""
    inputs = {
        *(columns.text or ()),
        *(columns.features or ()),
        columns.image,
        columns.tokens,
        "attention_mask",
    }
    for name in inputs - {None, "attention_mask"}:
        table.column(str(name), f"data.{_key(columns)}")
    return Table(table.where, {n: pick(c, rows) for n, c in table.columns.items() if n in inputs})


def _key(columns: Columns) -> str:
    return next(k for k in ("text", "image", "features", "tokens") if getattr(columns, k) is not None)


def _image_folder(path: Path, part: str | None) -> Path:
    """Image paths in a table are relative to the folder the table is in."""
    place = path if part is None else path / part
    return place if place.is_dir() else place.parent
