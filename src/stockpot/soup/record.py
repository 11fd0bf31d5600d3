"""The small file that rebuilds a soup: W, groups, ingredients with their digests, settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stockpot._version import __version__
from stockpot.errors import CheckpointError, DigestError, PoolError, SoupError, describe
from stockpot.events import Listener
from stockpot.layout import Layout
from stockpot.pool import Pool
from stockpot.pool.source import listed
from stockpot.pool.safetensors_files import open_safetensors
from stockpot.small_files import read_json

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
        value = read_json(file)
    except FileNotFoundError:
        raise SoupError(
            describe(
                str(path),
                expected=f"a saved soup with a {RECORD}",
                found="none",
                fix="pass the directory of a soup, as Soup.save writes it (RUN/methods/NAME/soup of a run)",
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
        pool = _matched(_opened(sources, _opened_with(value), given=ingredients is not None), entries, listen)
        _check_layout(layout, pool)
        statistics = read_statistics(folder, pool) if value["statistics"] == "recalibrated" else None
        return Soup(
            pool,
            layout,
            W,
            statistics=statistics,
            copy_statistics=value["statistics"] == "copied",
            temperature=None if value["temperature"] is None else float(value["temperature"]),
            free=bool(value["free"]),
            about=dict(value["about"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, OSError) as error:
        raise SoupError(
            describe(
                str(path),
                expected="a complete soup record",
                found=f"{type(error).__name__}: {error}",
                fix="restore the file, or cook again",
            )
        ) from error


def _opened(sources: Any, options: Mapping[str, Any], *, given: bool) -> Pool:
    try:
        return Pool.open(sources, **options)
    except PoolError as error:
        if given:
            raise
        where = "If the ingredients have moved, say where they are now: --pool, or ingredients= in Python."
        raise PoolError(f"{error}\n{where}") from error


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


def _check_layout(layout: Layout, pool: Pool) -> None:
    """A record can be edited or damaged: it must speak of exactly the tensors that the ingredients have."""
    places = {*layout.group_of, *layout.kept}
    groups = set(layout.group_of.values())
    tied = [name for names in layout.tied for name in names]
    wrong = None
    if places != set(pool.specs) or layout.group_of.keys() & layout.kept.keys() or not set(tied) <= places:
        wrong = "other tensors than the ingredients have"
    elif not all(0 <= group < len(layout.groups) for group in groups):
        wrong = f"groups outside of its {len(layout.groups)}"
    elif not 0 <= layout.donor < len(pool):
        wrong = f"ingredient {layout.donor} as donor, of {len(pool)}"
    elif any(pool.specs[name] != pool.specs[names[0]] for names in layout.tied for name in names):
        wrong = "tied tensors of different shapes"
    if wrong is not None:
        raise SoupError(
            describe(
                "layout of the soup record",
                expected="a group or a reason for each tensor of the ingredients",
                found=wrong,
                fix="restore the record from a copy, or cook again",
            )
        )


def read_statistics(folder: Path, pool: Pool) -> dict[str, torch.Tensor]:
    """Recalibrated running statistics, which must be those that the ingredients have, in their shapes."""
    try:
        file = open_safetensors(folder / STATISTICS)
    except CheckpointError as error:
        raise SoupError(str(error)) from error
    shapes = {name: spec.shape for name, spec in file.specs.items()}
    odd = [name for name in shapes if name not in pool.statistics or shapes[name] != pool.specs[name].shape]
    if odd:
        raise SoupError(
            describe(
                str(folder / STATISTICS),
                expected="running statistics in the shapes that the ingredients have",
                found="others: " + listed([f"{name} {list(shapes[name])}" for name in odd]),
                fix="restore the file from a copy, or cook again",
            )
        )
    return {name: file.read(name) for name in file.specs}


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
                found=f"other content or no file:\n{lines}\n  so it cannot be made again",
                fix="restore the original checkpoints, or say where they are now: --pool, or ingredients= in Python",
            )
        )
    return pool.subset(order)


def dtype_of(name: object) -> torch.dtype | None:
    """The dtype a soup was saved in; None: the ingredients' own."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if name is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise SoupError(
            describe(
                "dtype of the soup record",
                expected="a floating-point type such as 'bfloat16'",
                found=repr(name)[:80],
                fix="restore the record from a copy, or cook again",
            )
        )
    return found


def shard_of(size: object) -> int:
    if type(size) is not int or size <= 0:
        raise SoupError(
            describe(
                "max_shard of the soup record",
                expected="a number of bytes",
                found=repr(size)[:80],
                fix="restore the record from a copy, or cook again",
            )
        )
    return size
