"""From a source of data and its splits to the tensors a model is called with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.adapters.arrays import read_arrays
from stockpot.adapters.arrow import read_dataset
from stockpot.adapters.images import decode, read_image_folder
from stockpot.adapters.inputs import ImageInput, LoadedModel
from stockpot.adapters.labels import DEFAULTS, encode, label_name
from stockpot.adapters.splits import Share, cut, read_rows
from stockpot.adapters.tables import LIMITS, Array, Limits, Table, as_numbers, as_text, bad_data, pick, read_table
from stockpot.events import Listener, ignore

_READERS = {"images": read_image_folder, "table": read_table, "dataset": read_dataset, "arrays": read_arrays}


@dataclass(frozen=True)
class Columns:
    """Which columns are what; at most one kind of input is named, or the only candidate is taken."""

    text: tuple[str, ...] | None = None
    image: str | None = None
    features: tuple[str, ...] | None = None
    tokens: str | None = None
    label: str | None = None

    def with_input_of(self, table: Table) -> Columns:
        """Find the input where the recipe names none."""
        if self.text or self.image or self.features or self.tokens:
            return self
        skipped = {self.label} if self.label is not None else set(DEFAULTS)
        others = [name for name in table.columns if name not in skipped]
        usual = [name for name in ("x", "text", "image") if name in others][-1:]
        if len(others) != 1 and not usual:
            expected = "the name of its column in data.text, data.image, data.features or data.tokens"
            found = f"none named, and columns {', '.join(table.columns)}"
            raise bad_data(f"input in {table.where}", expected, found, "name it")
        (name,) = usual or others
        column = table.columns[name]
        if not isinstance(column, np.ndarray):
            return Columns(**{"image": name} if name == "image" else {"text": (name,)}, label=self.label)
        if name == "image" or (column.dtype == np.uint8 and column.ndim >= 3):
            return Columns(image=name, label=self.label)
        return Columns(features=(name,), label=self.label)


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
    target: str = "class"
    limits: Limits = LIMITS


def read_splits(
    source: DataSource, model: LoadedModel, image: ImageInput, wanted: Iterable[str], listen: Listener = ignore
) -> dict[str, Any]:
    """Tensors of the wanted splits. All splits' labels are looked at, so that classes never depend on `wanted`.

    A split is `(x, y)`, or a dict of keyword arguments where the model wants that.
    """
    read, wanted = _READERS[source.kind], set(wanted)
    parts = {s.part: read(source.path, s.part, source.limits) for s in source.shares.values()}
    for table in parts.values():
        if len(table) == 0:
            raise bad_data(table.where, "samples", "none", "check the file")
    targets = _targets(source, model, parts, listen)
    columns = source.columns.with_input_of(next(iter(parts.values())))
    made: dict[str, Any] = {}
    for part, table in parts.items():
        shares = {name: share for name, share in source.shares.items() if share.part == part}
        listed = {name: read_rows(share.rows, table) for name, share in shares.items() if share.rows}
        classes = targets.get(part) if source.target == "class" else None
        rows = cut(len(table), classes, shares, source.seed, table.where, listed)
        for name in (name for name in rows if name in wanted):
            inputs = _Inputs(source, model, image, table, rows[name], name, listen).read(columns)
            y = torch.from_numpy(targets[part][rows[name]]) if part in targets else None
            if isinstance(inputs, Tensor):
                made[name] = (inputs,) if y is None else (inputs, y)
                continue
            if y is None and "input_ids" in inputs:  # language models learn their own input; padding is not judged
                ids = inputs["input_ids"]
                y = ids.masked_fill(inputs.get("attention_mask", torch.ones_like(ids)) == 0, -100)
            made[name] = inputs if y is None else {**inputs, "labels": y}
    return made


def _targets(
    source: DataSource, model: LoadedModel, parts: Mapping[str | None, Table], listen: Listener
) -> dict[str | None, Array]:
    """Of every part; none for a language model, which learns its own input."""
    if model.language and source.columns.label is None:
        return {}
    called = {part: " and ".join(name for name, share in source.shares.items() if share.part == part) for part in parts}
    encoded = encode(
        {called[p]: t.column(label_name(t, source.columns.label), "data.label") for p, t in parts.items()},
        target=source.target,
        classes=source.classes,
        model_names=model.class_names,
        head=model.classes,
        listen=listen,
    )
    return {part: encoded[called[part]] for part in parts}


@dataclass(frozen=True)
class _Inputs:
    """The rows of one split and what is needed to make tensors of them."""

    source: DataSource
    model: LoadedModel
    image: ImageInput
    table: Table
    rows: Array
    name: str
    listen: Listener

    def read(self, columns: Columns) -> Tensor | dict[str, Tensor]:
        if columns.text is not None:
            return self._tokenised(columns.text)
        if columns.image is not None:
            return self._images(columns.image)
        if columns.tokens is not None:
            ids = {"input_ids": self._whole(columns.tokens)}
            if self.model.keywords and "attention_mask" in self.table.columns:
                ids["attention_mask"] = self._whole("attention_mask")
            return ids if self.model.keywords else ids["input_ids"]
        found = [self._numbers(name, "data.features") for name in columns.features or ()]
        wide = found[0] if len(found) == 1 else np.concatenate([a.reshape(len(a), -1) for a in found], axis=1)
        return torch.from_numpy(wide.astype(np.float32))

    def _images(self, column: str) -> Tensor | dict[str, Tensor]:
        source = self.source
        place = source.path / (source.shares[self.name].part or "")
        images = decode(
            pick(self.table.column(column, "data.image"), self.rows),
            self.image,
            folder=place if place.is_dir() else place.parent,  # paths are relative to the table they are in
            name=self.name,
            memory_limit=source.memory_limit,
            cache=source.cache,
            limits=source.limits,
            listen=self.listen,
        )
        channels = images.shape[1]
        for key in ("mean", "std") if images.dtype == torch.uint8 else ():
            if (given := len(getattr(self.image, key))) not in (1, channels):
                fix = "set channels: 1 or 3 in data.preprocessing, or give as many numbers"
                raise bad_data(f"data.preprocessing.{key}", f"{channels} numbers, one per channel", str(given), fix)
        return {"pixel_values": images} if self.model.keywords else images

    def _whole(self, name: str) -> Tensor:
        array = self._numbers(name, "data.tokens")
        if not np.array_equal(array, np.floor(array)):
            raise bad_data(f"data.tokens: {name}", "whole numbers", "fractions", "name a column of token ids")
        return torch.from_numpy(array.astype(np.int64))

    def _numbers(self, name: str, key: str) -> Array:
        column = pick(self.table.column(name, key), self.rows)
        return as_numbers(column, f"{key}: {name}", lambda row: self._where(key, name, row))

    def _tokenised(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        columns = []
        for name in names:
            cells = pick(self.table.column(name, "data.text"), self.rows)
            columns.append([as_text(cell, self._where("data.text", name, row)) for row, cell in enumerate(cells)])
        text = self.model.text
        if text is None:
            fix = "set model.tokenizer to its folder; for other models use data.tokens or data.python"
            raise bad_data(f"data.text: {', '.join(names)}", "a transformers model with a tokenizer", "none", fix)
        tokenizer = text.load()
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        limits = (self.source.max_length, text.max_length, tokenizer.model_max_length)
        longest = min(n for n in limits if n is not None)
        return dict(tokenizer(*columns, padding="longest", truncation=True, max_length=longest, return_tensors="pt"))

    def _where(self, key: str, name: str, row: int) -> str:
        return f"{key}: {name}, row {self.rows[row]} (from 0) of {self.table.where}"
