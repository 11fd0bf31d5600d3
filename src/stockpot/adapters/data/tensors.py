"""Columns of a table as the tensors a model is called with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.adapters.data.columns import Column, Table
from stockpot.adapters.data.labels import DEFAULTS
from stockpot.adapters.data.pictures import decode
from stockpot.adapters.inputs import ImageInput, LoadedModel
from stockpot.errors import DataError, describe
from stockpot.events import Listener


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
            raise DataError(
                describe(
                    f"input in {table.where}",
                    expected="the name of its column in data.text, data.image, data.features or data.tokens",
                    found=f"none named, and columns {', '.join(table.columns)}",
                    fix="name it",
                )
            )
        name = others[0]
        column = table.columns[name]
        if name == "image" or (
            isinstance(column, np.ndarray) and column.dtype == np.uint8 and column.ndim >= 3
        ):
            return Columns(image=name, label=self.label)
        if isinstance(column, np.ndarray):
            return Columns(features=(name,), label=self.label)
        return Columns(text=(name,), label=self.label)


@dataclass(frozen=True)
class Making:
    """What is needed besides the table to make tensors."""

    model: LoadedModel
    image: ImageInput
    max_length: int | None
    folder: Path
    memory_limit: int
    listen: Listener
    cache: Path | None = None


def tensors(
    table: Table, columns: Columns, labels: np.ndarray[Any, Any] | None, name: str, making: Making
) -> Any:
    """`(x, y)`, or a dict of keyword arguments where the model wants that."""
    inputs = _inputs(table, columns, name, making)
    y = None if labels is None else torch.from_numpy(labels)
    if isinstance(inputs, dict):
        if y is None and "input_ids" in inputs:
            y = _next_tokens(inputs)
        return inputs if y is None else {**inputs, "labels": y}
    return (inputs,) if y is None else (inputs, y)


def _inputs(table: Table, columns: Columns, name: str, making: Making) -> Tensor | dict[str, Tensor]:
    if columns.text is not None:
        return _tokenised(table, columns.text, making)
    if columns.tokens is not None:
        ids = torch.from_numpy(_numbers(table, columns.tokens, "data.tokens").astype(np.int64))
        if not making.model.keywords:
            return ids
        mask = table.columns.get("attention_mask")
        extra = (
            {} if mask is None else {"attention_mask": torch.from_numpy(np.asarray(mask).astype(np.int64))}
        )
        return {"input_ids": ids, **extra}
    if columns.image is not None:
        return _pictures(table, columns.image, name, making)
    assert columns.features is not None
    found = [_numbers(table, column, "data.features") for column in columns.features]
    if len(found) == 1:
        return torch.from_numpy(found[0].astype(np.float32))
    wide = [array.reshape(len(array), -1) for array in found]
    return torch.from_numpy(np.concatenate(wide, axis=1).astype(np.float32))


def _pictures(table: Table, column: str, name: str, making: Making) -> Tensor | dict[str, Tensor]:
    wanted = making.image
    images = decode(
        table.column(column, "data.image"),
        wanted,
        making.folder,
        making.memory_limit,
        name,
        making.listen,
        making.cache,
    )
    for key in ("mean", "std"):
        given = len(getattr(wanted, key))
        if images.dtype == torch.uint8 and given not in (1, images.shape[1]):
            raise DataError(
                describe(
                    f"data.preprocessing.{key}",
                    expected=f"{images.shape[1]} numbers, one per channel",
                    found=str(given),
                    fix="set channels: 1 or 3 in data.preprocessing, or give as many numbers",
                )
            )
    return {"pixel_values": images} if making.model.keywords else images


def _numbers(table: Table, name: str, key: str) -> np.ndarray[Any, Any]:
    column = table.column(name, key)
    try:
        array = np.asarray(_floats(column), dtype=None if isinstance(column, np.ndarray) else np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(
            describe(
                f"{key}: {name}",
                expected="numbers, as many in every row",
                found=str(error),
                fix="name a column of numbers, or fill in what is missing",
            )
        ) from error
    if array.dtype.kind not in "biuf":
        raise DataError(
            describe(f"{key}: {name}", expected="numbers", found=str(array.dtype), fix="name another column")
        )
    return array


def _floats(column: Column) -> Any:
    if isinstance(column, np.ndarray):
        return column
    return [float(v) if isinstance(v, str) else v for v in column]


def _tokenised(table: Table, names: tuple[str, ...], making: Making) -> dict[str, Tensor]:
    text = making.model.text
    if text is None:
        raise DataError(
            describe(
                f"data.text: {', '.join(names)}",
                expected="a transformers model with a tokenizer",
                found="none",
                fix="set model.tokenizer to its folder; for other models use data.tokens or data.python",
            )
        )
    tokenizer = text.load()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    limits = [making.max_length, text.max_length, tokenizer.model_max_length]
    columns = [[str(v) for v in table.column(name, "data.text")] for name in names]
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
