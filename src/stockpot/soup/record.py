"""The small file that rebuilds a soup: W, groups, ingredients with their digests, settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from stockpot._version import __version__
from stockpot.errors import DigestError, SoupError, describe
from stockpot.events import Listener
from stockpot.layout import Layout
from stockpot.pool import Pool

if TYPE_CHECKING:
    from stockpot.soup.soup import Soup

RECORD = "soup.json"
STATISTICS = "statistics.safetensors"
FORMAT = 1


def encode(soup: Soup, digests: tuple[str, ...], dtype: torch.dtype | None, max_shard: int) -> dict[str, Any]:
    pool = soup.pool
    return {
        "format": FORMAT,
        "stockpot": __version__,
        "about": dict(soup.about),
        "ingredients": [
            {"name": name, "path": str(checkpoint.path.resolve()), "digest": digest}
            for name, checkpoint, digest in zip(pool.names, pool.checkpoints, digests, strict=True)
        ],
        "opened_with": pool.opened_with,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "max_shard": max_shard,
        "free": soup.free,
        "temperature": soup.temperature,
        "statistics": "recalibrated"
        if soup.statistics is not None
        else "copied"
        if soup.copy_statistics
        else "averaged",
        "layout": soup.layout.to_json(),
        "W": soup.W.tolist(),
    }


def read(path: Path) -> dict[str, Any]:
    """The record in a soup's directory, or given as the file itself."""
    file = path / RECORD if path.is_dir() else path
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise SoupError(
            describe(
                str(path),
                expected=f"a saved soup with a {RECORD}",
                found="none",
                fix="pass the directory that Soup.save wrote",
            )
        ) from None
    except (ValueError, OSError) as error:
        raise SoupError(
            describe(
                str(file),
                expected="a readable soup record",
                found=str(error),
                fix="restore the file from a copy, or cook again",
            )
        ) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise SoupError(
            describe(
                str(file),
                expected=f"a soup record of format {FORMAT}",
                found=repr(found),
                fix="update stockpot",
            )
        )
    return value


def load(path: Path, ingredients: str | Path | Iterable[str | Path] | None, listen: Listener) -> Soup:
    from stockpot.soup.soup import Soup  # the record is part of Soup; this breaks the circle

    value = read(path)
    folder = path if path.is_dir() else path.parent
    try:
        entries: list[Mapping[str, str]] = value["ingredients"]
        layout = Layout.from_json(value["layout"])
        W = torch.tensor(value["W"], dtype=torch.float64)
        sources = ingredients if ingredients is not None else [entry["path"] for entry in entries]
        pool = _matched(Pool.open(sources, **_opened_with(value)), entries, listen)
        statistics = load_file(folder / STATISTICS) if value["statistics"] == "recalibrated" else None
        return Soup(
            pool,
            layout,
            W,
            statistics=statistics,
            copy_statistics=value["statistics"] == "copied",
            temperature=value["temperature"],
            free=value["free"],
            about=value["about"],
        )
    except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise SoupError(
            describe(
                str(path),
                expected="a complete soup record",
                found=f"{type(error).__name__}: {error}",
                fix="restore the file, or cook again",
            )
        ) from error


def _opened_with(value: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(value["opened_with"])
    if given.get("rename") == "custom":
        raise SoupError(
            describe(
                "soup record",
                expected="renaming by a prefix map",
                found="a Python function, which is not stored",
                fix="open the pool yourself and build Soup(pool, layout, W)",
            )
        )
    return given


def _matched(pool: Pool, entries: list[Mapping[str, str]], listen: Listener) -> Pool:
    """The pool in the record's order; each ingredient must be, byte for byte, what the soup was made of."""
    found: dict[str, list[int]] = {}
    for k, digest in enumerate(pool.digests(listen)):
        found.setdefault(digest, []).append(k)
    order, lacking = [], []
    for entry in entries:
        places = found.get(entry["digest"], [])
        if not places:
            lacking.append(entry)
        else:
            order.append(places.pop(0) if len(places) > 1 else places[0])
    if lacking:
        lines = "\n".join(
            f"    {entry['name']} ({entry['path']}): sha256 {entry['digest'][:16]}..." for entry in lacking
        )
        raise DigestError(
            describe(
                f"{len(lacking)} of {len(entries)} ingredients",
                expected="the content the soup was made of",
                found=f"other content or no file:\n{lines}\n ",
                fix="restore the original checkpoints, or pass ingredients= with their place",
            )
        )
    return pool.subset(order)


def dtype_of(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
