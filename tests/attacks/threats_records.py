"""Saved soups and run directories of strangers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from attacks.kit import Threat, threat
from stockpot import Pool, Soup
from stockpot.layout import Layout

SOUPS: list[Threat] = []


def pool(folder: Path) -> Pool:
    """Two honest ingredients with a running statistic."""
    (folder / "pool").mkdir(parents=True)
    for k in range(2):
        state = {"w": torch.arange(4.0) + k, "head": torch.ones(3) * k, "norm.running_mean": torch.zeros(2) + k}
        save_file(state, folder / "pool" / f"m{k}.safetensors")
    return Pool.open(folder / "pool")


def soup(folder: Path) -> Path:
    opened = pool(folder)
    W = torch.full((2, 2), 0.5, dtype=torch.float64)
    made = Soup(opened, Layout.of(opened), W, statistics={"norm.running_mean": torch.zeros(2)})
    return made.save(folder / "soup")


def _changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = soup(folder)
        record = json.loads((path / "soup.json").read_text())
        change(record)
        (path / "soup.json").write_text(json.dumps(record))
        return path

    return make


def _put(*keys: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(record: dict[str, Any]) -> None:
        place: Any = record
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return change


for _name, _change, _words in (
    ("soup: a function of torch as dtype", _put("dtype", value="load"), "a floating-point type"),
    ("soup: a number as dtype", _put("dtype", value=7), "a floating-point type"),
    ("soup: integers as dtype", _put("dtype", value="int8"), "a floating-point type"),
    ("soup: shards of minus one byte", _put("max_shard", value=-1), "a number of bytes"),
    ("soup: shards of a text", _put("max_shard", value="all"), "a number of bytes"),
    ("soup: a donor that is not there", _put("layout", "donor", value=99), "ingredient 99 as donor"),
    ("soup: a negative donor", _put("layout", "donor", value=-1), "ingredient -1 as donor"),
    ("soup: a group that is not there", _put("layout", "group_of", "w", value=7), "groups outside"),
    ("soup: a negative group", _put("layout", "group_of", "w", value=-1), "groups outside"),
    ("soup: a tensor that is not there", _put("layout", "group_of", "x", value=0), "other tensors than"),
    ("soup: tied tensors of other shapes", _put("layout", "tied", value=[["w", "head"]]), "of different shapes"),
    ("soup: tied tensors that are not there", _put("layout", "tied", value=[["x", "y"]]), "other tensors than"),
    ("soup: a layout that is a list", _put("layout", value=[]), "a complete soup record"),
    ("soup: weights that are texts", _put("W", value=[["a", "b"], ["c", "d"]]), "a complete soup record"),
    ("soup: weights that are infinite", _put("W", value=[[1e400, 0], [0, 1]]), "expected finite numbers"),
    ("soup: weights that do not sum to one", _put("W", value=[[1, 1], [1, 1]]), "columns that sum to one"),
    ("soup: weights that need not sum to one", _put("free", value=True), "a soup as this version makes them"),
    ("soup: a rule for statistics that there is not", _put("statistics", value="copied"), "as this version makes"),
    (
        "soup: a model of the Hub as path",
        lambda r: r["ingredients"][0].update(path="hf://stranger/model"),
        "hf:/stranger/model",
    ),
    (
        "soup: a pattern over the whole disk as path",
        lambda r: r["ingredients"][0].update(path="/**/*"),
        "no files match",
    ),
    ("soup: no ingredients", _put("ingredients", value=[]), "expected at least two ingredients"),
    ("soup: ingredients that are numbers", _put("ingredients", value=[1, 2]), "a complete soup record"),
    (
        "soup: settings of another function",
        _put("opened_with", value={"listen": 1, "evil": 2}),
        "a complete soup record",
    ),
    ("soup: other digests", lambda r: r["ingredients"][0].update(digest="0" * 64), "the content the soup was made of"),
    ("soup: another format", _put("format", value=2), "a soup record of format 1"),
):
    SOUPS.append(Threat(_name, _changed(_change), _words))


@threat("soup: a record nested a hundred thousand deep", "a readable soup record", SOUPS)
def deep_record(folder: Path) -> Path:
    path = soup(folder)
    (path / "soup.json").write_text("[" * 100_000)
    return path


@threat("soup: one key twice", "appears twice", SOUPS)
def record_twice(folder: Path) -> Path:
    path = soup(folder)
    text = (path / "soup.json").read_text()
    (path / "soup.json").write_text(text.replace('"about":', '"about": {}, "about":', 1))
    return path


@threat("soup: a record that is a FIFO", "not a regular file", SOUPS)
def record_fifo(folder: Path) -> Path:
    path = soup(folder)
    (path / "soup.json").unlink()
    os.mkfifo(path / "soup.json")
    return path


@threat("soup: a record without an end", "is a symbolic link, which is never followed", SOUPS)
def record_endless(folder: Path) -> Path:
    path = soup(folder)
    (path / "soup.json").unlink()
    (path / "soup.json").symlink_to("/dev/zero")
    return path


@threat("soup: statistics of other shapes", "in the shapes that the ingredients have", SOUPS)
def other_statistics(folder: Path) -> Path:
    path = soup(folder)
    save_file({"norm.running_mean": torch.zeros(3)}, path / "statistics.safetensors")
    return path


@threat("soup: statistics that replace weights", "in the shapes that the ingredients have", SOUPS)
def stolen_weights(folder: Path) -> Path:
    """They would be taken for the soup's weights, whatever W says."""
    path = soup(folder)
    save_file({"norm.running_mean": torch.zeros(2), "w": torch.zeros(4)}, path / "statistics.safetensors")
    return path


@threat("soup: statistics that are a FIFO", "is neither a regular file nor a directory", SOUPS)
def statistics_fifo(folder: Path) -> Path:
    path = soup(folder)
    (path / "statistics.safetensors").unlink()
    os.mkfifo(path / "statistics.safetensors")
    return path
