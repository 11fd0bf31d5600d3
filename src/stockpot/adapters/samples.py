"""From a source of data and its splits to the tensors a model is called with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.adapters.binary import read_arrays, read_dataset
from stockpot.adapters.images import decode, read_image_folder
from stockpot.adapters.labels import encode, label_column
from stockpot.adapters.models import ImageInput, LoadedModel
from stockpot.adapters.questions import QuestionReader
from stockpot.adapters.splits import DataSource, cut, read_rows
from stockpot.adapters.tables import Array, Column, Table, bad_data, documents, read_table
from stockpot.adapters.texts import TextReader
from stockpot.errors import StockpotError
from stockpot.events import Event, Listener, ignore
from stockpot.task.data import Data

_READERS = {"images": read_image_folder, "table": read_table, "dataset": read_dataset, "arrays": read_arrays}
Part = tuple[Path, str | None]  # where samples are, and which of those


def read_splits(
    source: DataSource, model: LoadedModel, image: ImageInput, wanted: Iterable[str], listen: Listener = ignore
) -> dict[str, Any]:
    """Tensors of the wanted splits. All splits' labels are looked at, so that classes never depend on `wanted`.

    A split is `(x, y)`, or a dict of keyword arguments where the model wants that; a `Data` where samples have groups.
    """
    wanted = set(wanted)
    split_parts: dict[str, Part] = {n: (share.path or source.path, share.part) for n, share in source.shares.items()}
    parts = {part: _read(source, *part) for part in dict.fromkeys(split_parts.values())}
    for table in parts.values():
        if len(table) == 0:
            raise bad_data(table.where, "samples", "none", "check the file")
        if len(table) == 1 and table.where.lower().endswith(".txt"):
            fix = "name what separates documents, such as data.separator: '<|endoftext|>', or give a folder of files"
            raise bad_data(table.where, "several documents, the independent units of all scores", "one", fix)
    targets = _targets(source, model, parts, split_parts, listen)
    columns = source.columns.with_input_of(next(iter(parts.values())))
    source = replace(source, columns=columns)
    made: dict[str, Any] = {}
    groups: dict[str, Array] = {}
    for part, table in parts.items():
        shares = {name: share for name, share in source.shares.items() if split_parts[name] == part}
        listed = {name: read_rows(share.rows, table) for name, share in shares.items() if share.rows}
        classes = targets.get(part) if source.target == "class" else None
        named = None  # what each row belongs to, as text (each of its own length); (n,)
        if columns.group is not None:
            named = np.array(table.texts(columns.group, "data.group"), dtype=object)
        rows = cut(len(table), classes, shares, source.seed, table.where, listed, named)
        for name in (name for name in rows if name in wanted):
            share, y = replace(table, rows=rows[name]), None
            inputs: Any
            if named is not None:
                groups[name] = named[rows[name]]
            if part in targets:
                y = torch.from_numpy(targets[part][rows[name]])
            if columns.is_text:
                asks = source.metric == "exact_match" and bool(columns.prompt or columns.messages)
                reader = QuestionReader if asks or columns.choices is not None else TextReader
                inputs, origin = reader(source, model, share, name, listen).read()
                y = None if y is None else y[torch.from_numpy(origin)]
                if named is not None:
                    groups[name] = groups[name][origin]
                elif len(np.unique(origin)) < len(origin):  # pieces of one text
                    groups[name] = origin
            else:
                inputs = _inputs(source, model, share, name, image, listen)
            if isinstance(inputs, Tensor):
                made[name] = (inputs,) if y is None else (inputs, y)
                continue
            if y is None and "input_ids" in inputs and "labels" not in inputs:  # ids of the user's own
                ids = inputs["input_ids"]
                y = ids.masked_fill(inputs.get("attention_mask", torch.ones_like(ids)) == 0, -100)
            made[name] = inputs if y is None else {**inputs, "labels": y}
    _tell_shared(groups if columns.group else {}, listen)
    for name, given in groups.items():
        numbers = np.unique(given, return_inverse=True)[1]
        made[name] = Data.of(made[name], groups=numbers, name=f"{name} data", memory_limit=source.memory_limit)
    return made


def _read(source: DataSource, path: Path, part: str | None) -> Table:
    try:
        table = _READERS[source.kind](path, part, source.limits)
        return table if source.separator is None else documents(table, source.separator, source.limits)
    except StockpotError:
        raise
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        where = str(path if part is None else path / part)
        raise bad_data(where[:200], "data", error.strerror or str(error), "check path and permissions") from error


def _tell_shared(groups: Mapping[str, Array], listen: Listener) -> None:
    """Splits that were cut elsewhere may have groups in common, which flatters what is reported."""
    for name in (name for name in groups if name.startswith("report") and "fit" in groups):
        reported = np.unique(groups[name])
        both = int(np.isin(reported, groups["fit"]).sum())
        if both:
            what = f"report data{name.removeprefix('report').replace('.', ' ', 1)}"
            text = f"{what}: {both:,} of {len(reported):,} groups of data.group are in the fitting data too"
            listen(Event("phase", {"text": text}))


def _targets(
    source: DataSource, model: LoadedModel, parts: Mapping[Part, Table], splits: Mapping[str, Part], listen: Listener
) -> dict[Part, Array]:
    """Of every part; none for a language model, which learns its own input, and for words that have tags."""
    columns = source.columns
    if columns.label is None and (model.purpose == "causal" or columns.messages or columns.prompt or columns.words):
        return {}
    called = {part: " and ".join(name for name, its in splits.items() if its == part) for part in parts}
    encoded = encode(
        {called[p]: label_column(t, columns.label) for p, t in parts.items()},
        target=source.target,
        classes=source.classes,
        model_names=model.class_names,
        head=model.classes,
        listen=listen,
    )
    return {part: encoded[called[part]] for part in parts}


def _inputs(
    source: DataSource, model: LoadedModel, table: Table, split: str, image: ImageInput, listen: Listener
) -> Tensor | dict[str, Tensor]:
    """What the model is called with for the rows of one split."""
    columns = source.columns
    if columns.image is not None:
        images = _images(table.column(columns.image, "data.image"), source, table, split, image, listen)
        return {"pixel_values": images} if model.keywords else images
    if columns.tokens is not None:
        if not model.keywords:
            return _ids(table, columns.tokens)
        mask = ["attention_mask"] if "attention_mask" in table.columns else []
        return {"input_ids": _ids(table, columns.tokens), **{name: _ids(table, name) for name in mask}}
    found = [table.numbers(name, "data.features") for name in columns.features or ()]
    wide = found[0] if len(found) == 1 else np.concatenate([a.reshape(len(a), -1) for a in found], axis=1)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    if (lost := np.isfinite(wide) & ~np.isfinite(narrow)).any():
        names, largest = ", ".join(columns.features or ()), wide[lost].flat[0]
        raise bad_data(f"data.features: {names}", "numbers that float32 can hold", f"{largest:g}", "scale them")
    return torch.from_numpy(narrow)


def _ids(table: Table, name: str) -> Tensor:
    array = table.numbers(name, "data.tokens")
    if not np.array_equal(array, np.floor(array)):
        raise bad_data(f"data.tokens: {name}", "whole numbers", "fractions", "name a column of token ids")
    return torch.from_numpy(array.astype(np.int64))


def _images(
    column: Column, source: DataSource, table: Table, split: str, image: ImageInput, listen: Listener
) -> Tensor:
    place = Path(table.where)
    images = decode(
        column,
        image,
        folder=place if place.is_dir() else place.parent,  # paths are relative to the table they are in
        name=split,
        memory_limit=source.memory_limit,
        cache=source.cache,
        limits=source.limits,
        listen=listen,
    )
    channels = images.shape[1]
    for key in ("mean", "std") if images.dtype == torch.uint8 else ():
        if (given := len(getattr(image, key))) not in (1, channels):
            fix = "set channels: 1 or 3 in data.preprocessing, or give as many numbers"
            raise bad_data(f"data.preprocessing.{key}", f"{channels} numbers, one per channel", str(given), fix)
    return images
