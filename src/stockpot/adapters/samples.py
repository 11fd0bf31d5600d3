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
from stockpot.adapters.tables import LIMITS, Array, Limits, Table, as_text, bad_data, is_missing, pick, read_table
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
        for usual in ("image", "text", "x"):
            if usual in others:
                others = [usual]
        if len(others) != 1:
            raise bad_data(
                f"input in {table.where}",
                "the name of its column in data.text, data.image, data.features or data.tokens",
                f"none named, and columns {', '.join(table.columns)}",
                "name it",
            )
        name = others[0]
        column = table.columns[name]
        is_array = isinstance(column, np.ndarray)
        if name == "image" or (is_array and column.dtype == np.uint8 and column.ndim >= 3):  # type: ignore[union-attr]
            return Columns(image=name, label=self.label)
        if is_array:
            return Columns(features=(name,), label=self.label)
        return Columns(text=(name,), label=self.label)


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
            if isinstance(inputs, dict):
                if y is None and "input_ids" in inputs:
                    y = _next_tokens(inputs)
                made[name] = inputs if y is None else {**inputs, "labels": y}
            else:
                made[name] = (inputs,) if y is None else (inputs, y)
    return made


def _targets(
    source: DataSource, model: LoadedModel, parts: Mapping[str | None, Table], listen: Listener
) -> dict[str | None, Array]:
    """Of every part; none for a language model, which learns its own input."""
    if model.language and source.columns.label is None:
        return {}
    called = {part: " and ".join(name for name, share in source.shares.items() if share.part == part) for part in parts}
    columns = {
        called[part]: table.column(label_name(table, source.columns.label), "data.label")
        for part, table in parts.items()
    }
    encoded = encode(
        columns,
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
            ids = self._whole(columns.tokens, "data.tokens")
            if not self.model.keywords:
                return ids
            if "attention_mask" not in self.table.columns:
                return {"input_ids": ids}
            return {"input_ids": ids, "attention_mask": self._whole("attention_mask", "data.tokens")}
        assert columns.features is not None
        found = [self._numbers(name, "data.features") for name in columns.features]
        wide = found[0] if len(found) == 1 else np.concatenate([a.reshape(len(a), -1) for a in found], axis=1)
        return torch.from_numpy(wide.astype(np.float32))

    def _images(self, column: str) -> Tensor | dict[str, Tensor]:
        place = self.source.path if not (part := self._part()) else self.source.path / part
        images = decode(
            pick(self.table.column(column, "data.image"), self.rows),
            self.image,
            folder=place if place.is_dir() else place.parent,  # paths are relative to the table they are in
            name=self.name,
            memory_limit=self.source.memory_limit,
            cache=self.source.cache,
            limits=self.source.limits,
            listen=self.listen,
        )
        for key in ("mean", "std"):
            given = len(getattr(self.image, key))
            if images.dtype == torch.uint8 and given not in (1, images.shape[1]):
                raise bad_data(
                    f"data.preprocessing.{key}",
                    f"{images.shape[1]} numbers, one per channel",
                    str(given),
                    "set channels: 1 or 3 in data.preprocessing, or give as many numbers",
                )
        return {"pixel_values": images} if self.model.keywords else images

    def _part(self) -> str | None:
        return self.source.shares[self.name].part

    def _whole(self, name: str, key: str) -> Tensor:
        array = self._numbers(name, key)
        if array.dtype.kind == "f" and not np.array_equal(array, np.floor(array)):
            raise bad_data(f"{key}: {name}", "whole numbers", "fractions", "name a column of token ids")
        return torch.from_numpy(array.astype(np.int64))

    def _numbers(self, name: str, key: str) -> Array:
        column = pick(self.table.column(name, key), self.rows)
        fix = "name a column of numbers, or fill in what is missing"
        if not isinstance(column, np.ndarray):
            for row, value in zip(self.rows.tolist(), column, strict=True):
                where = f"{key}: {name}, row {row} (from 0) of {self.table.where}"
                if is_missing(value):
                    raise bad_data(where, "numbers", "nothing", fix)
                try:
                    np.asarray(value, dtype=np.float64)
                except (TypeError, ValueError, OverflowError) as error:
                    raise bad_data(where, "numbers", repr(value)[:80], fix) from error
            try:
                column = np.asarray(column, dtype=np.float64)
            except ValueError as error:
                expected = "as many numbers in every row"
                raise bad_data(f"{key}: {name}", expected, "rows of different lengths", fix) from error
        if column.dtype.kind not in "biuf":
            raise bad_data(f"{key}: {name}", "numbers", str(column.dtype), "name another column")
        return column

    def _tokenised(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        text = self.model.text
        columns = [
            [
                as_text(value, f"data.text: {name}, row {row} (from 0) of {self.table.where}")
                for row, value in zip(
                    self.rows.tolist(), pick(self.table.column(name, "data.text"), self.rows), strict=True
                )
            ]
            for name in names
        ]
        if text is None:
            raise bad_data(
                f"data.text: {', '.join(names)}",
                "a transformers model with a tokenizer",
                "none",
                "set model.tokenizer to its folder; for other models use data.tokens or data.python",
            )
        tokenizer = text.load()
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        limits = (self.source.max_length, text.max_length, tokenizer.model_max_length)
        encoded = tokenizer(
            *columns,
            padding="longest",
            truncation=True,
            max_length=min(n for n in limits if n is not None),
            return_tensors="pt",
        )
        return dict(encoded)


def _next_tokens(inputs: dict[str, Tensor]) -> Tensor:
    """Language models learn their own input; padding is not judged."""
    mask = inputs.get("attention_mask")
    ids = inputs["input_ids"].clone()
    return ids if mask is None else ids.masked_fill(mask == 0, -100)
