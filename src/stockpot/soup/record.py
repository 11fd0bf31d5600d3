"""The small file that rebuilds a soup: W, groups, ingredients with their digests, settings."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from stockpot import files
from stockpot._version import __version__
from stockpot.errors import CheckpointError, DigestError, PoolError, SoupError
from stockpot.events import Listener
from stockpot.layout import ABSENT, Layout
from stockpot.pool import Pool
from stockpot.pool.checkpoint import open_safetensors
from stockpot.pool.source import dtype_name, listed
from stockpot.soup.weights import StatisticsRule

if TYPE_CHECKING:
    from stockpot.soup.soup import Soup

Ingredients = Pool | str | Path | Iterable[str | Path] | None  # where they are now; None: where they were
RECORD = "soup.json"
STATISTICS = "statistics.safetensors"
FORMAT = 1
# What a record says of running statistics, and the rule that makes them again.
_RULES: Mapping[str, StatisticsRule] = {"recalibrated": "recalibrate", "averaged": "average", "donor": "copy"}


def write(folder: Path, soup: Soup, max_shard: int, dtype: torch.dtype | None = None, root: Path | None = None) -> None:
    """The record of a soup, and its statistics where they were measured again, without its weights."""
    pool, statistics = soup.pool, "donor" if soup.statistics_rule == "copy" else "averaged"
    if soup.statistics is not None:
        statistics = "recalibrated"
        data = save({name: tensor.contiguous() for name, tensor in soup.statistics.items()})
        files.write_bytes(folder / STATISTICS, data, root)
    value = {
        "format": FORMAT,
        "stockpot": __version__,
        "about": dict(soup.about),
        "ingredients": [
            {"name": name, "path": str(checkpoint.path.resolve()), "digest": digest}
            for name, checkpoint, digest in zip(pool.names, pool.checkpoints, pool.digests(), strict=True)
        ],
        "opened_with": pool.opened_with,
        "dtype": None if dtype is None else dtype_name(dtype),
        "max_shard": max_shard,
        **({} if soup.pool.adapters is None else {"form": soup.written_as}),
        "statistics": statistics,
        "layout": soup.layout.to_json(),
        "W": soup.W.tolist(),
    }
    files.write_json(folder / RECORD, value, root)


def read(path: Path) -> dict[str, Any]:
    """The record in a soup's directory, or given as the file itself. No link in the directory is followed."""
    file = path / RECORD if path.is_dir() else path
    try:
        value = files.read_json(file)
    except FileNotFoundError:
        fix = "pass the directory of a soup, as Soup.save writes it (RUN/methods/NAME/soup of a run)"
        raise SoupError.of(str(path), expected=f"a saved soup with a {RECORD}", found="none", fix=fix) from None
    except (ValueError, OSError) as error:
        raise _damaged(str(file), "a readable soup record", str(error)) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        expected = f"a soup record of format {FORMAT}"
        raise SoupError.of(str(file), expected=expected, found=repr(found)[:80], fix="update stockpot")
    return value


def load(path: Path, ingredients: Ingredients, listen: Listener) -> Soup:
    from stockpot.soup.soup import Soup  # the record is part of Soup; this breaks the circle

    value = read(path)
    try:
        said = value["statistics"]
        if said not in _RULES or value.get("free"):
            old = "weights that need not sum to one" if value.get("free") else f"the statistics {said!r:.80}"
            raise _damaged(str(path), "a soup as this version makes them", old)
        layout, W = Layout.from_json(value["layout"]), torch.tensor(value["W"], dtype=torch.float64)
        pool = ingredients if isinstance(ingredients, Pool) else _opened(value, ingredients)
        pool = _matched(pool, value["ingredients"], listen)
        _check_layout(layout, pool)
        statistics = _statistics(path if path.is_dir() else path.parent, pool) if said == "recalibrated" else None
        form, about = value.get("form", "merged"), dict(value["about"])  # a soup without one is a full model
        return Soup(pool, layout, W, statistics, statistics_rule=_RULES[said], about=about, form=form)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, OSError) as error:
        raise _damaged(str(path), "a complete soup record", f"{type(error).__name__}: {error}") from error


def _damaged(subject: str, expected: str, found: str) -> SoupError:
    fix = "restore the file from a copy, or cook again"
    return SoupError.of(subject, expected=expected, found=found, fix=fix)


def _opened(value: Mapping[str, Any], ingredients: Any) -> Pool:
    options = dict(value["opened_with"])
    if options.keys() - {"base"} != {"key", "rename", "mixed_dtypes"}:
        raise ValueError("opened_with has other options than a pool is opened with")
    if options["rename"] == "custom":
        expected = "renaming by a prefix map"
        fix = "open the pool yourself and pass it as ingredients="
        raise SoupError.of("soup record", expected=expected, found="a Python function, which is not stored", fix=fix)
    if ingredients is not None:
        return Pool.open(ingredients, **options)
    # A record names files; a stranger's pattern such as /**/* would search the whole disk, and hf:// would go online.
    paths = [str(Path(entry["path"])) for entry in value["ingredients"]]
    try:
        return Pool.open([path if os.path.lexists(path) else glob.escape(path) for path in paths], **options)
    except PoolError as error:
        where = "If the ingredients have moved, say where they are now: --pool, or ingredients= in Python."
        raise PoolError(f"{error}\n{where}") from error


def _check_layout(layout: Layout, pool: Pool) -> None:
    """A record can be edited or damaged: it must speak of exactly the tensors that the ingredients have."""
    places = {*layout.group_of, *layout.kept}
    groups = set(layout.group_of.values())
    tied = [name for names in layout.tied for name in names]
    wrong = None
    if places != set(pool.specs) or layout.group_of.keys() & layout.kept.keys() or not set(tied) <= places:
        wrong = "other tensors than the ingredients have"
    elif any(reason == ABSENT and name not in pool.spare for name, reason in layout.kept.items()):
        wrong = "tensors that are left out, although ingredients change them"
    elif not all(0 <= group < len(layout.groups) for group in groups):
        wrong = f"groups outside of its {len(layout.groups)}"
    elif not 0 <= layout.donor < len(pool):
        wrong = f"ingredient {layout.donor} as donor, of {len(pool)}"
    elif any(pool.specs[name] != pool.specs[names[0]] for names in layout.tied for name in names):
        wrong = "tied tensors of different shapes"
    if wrong is not None:
        raise _damaged("layout of the soup record", "a group or a reason for each tensor of the ingredients", wrong)


def _statistics(folder: Path, pool: Pool) -> dict[str, torch.Tensor]:
    """Recalibrated running statistics, which must be those that the ingredients have, in their shapes."""
    try:
        file = open_safetensors(files.check_inside(folder, folder / STATISTICS))
    except CheckpointError as error:
        raise SoupError(str(error)) from error
    shapes = {name: spec.shape for name, spec in file.specs.items()}
    odd = [name for name in shapes if name not in pool.statistics or shapes[name] != pool.specs[name].shape]
    if odd:
        expected = "running statistics in the shapes that the ingredients have"
        texts = listed([f"{name} {list(shapes[name])}" for name in odd])
        raise _damaged(str(folder / STATISTICS), expected, f"others: {texts}")
    return {name: file.read(name) for name in file.specs}


def _matched(pool: Pool, entries: list[Mapping[str, str]], listen: Listener) -> Pool:
    """The pool in the record's order; each ingredient must be, byte for byte, what the soup was made of."""
    found: dict[str, list[int]] = {}
    for k, digest in enumerate(pool.digests(listen)):
        found.setdefault(digest, []).append(k)
    if lacking := [entry for entry in entries if entry["digest"] not in found]:
        lines = "\n".join(f"    {one['name']} ({one['path']}): sha256 {one['digest'][:16]}..." for one in lacking)
        raise DigestError.of(
            f"{len(lacking)} of {len(entries)} ingredients",
            expected="the content the soup was made of",
            found=f"other content or no file:\n{lines}\n  so it cannot be made again",
            fix="restore the original checkpoints, or say where they are now: --pool, or ingredients= in Python",
        )
    # Of ingredients with the same content the last one serves as often as the record asks for it.
    places = (found[entry["digest"]] for entry in entries)
    return pool.subset([alike.pop(0) if len(alike) > 1 else alike[0] for alike in places])


def saved_as(path: Path) -> tuple[torch.dtype | None, int]:
    """The dtype that a soup was saved in (None: the ingredients' own), and the bytes of its shards at most."""
    value = read(path)
    name, size = value.get("dtype"), value.get("max_shard")
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise _damaged("dtype of the soup record", "a floating-point type such as 'bfloat16'", repr(name)[:80])
    if type(size) is not int or size <= 0:
        raise _damaged("max_shard of the soup record", "a number of bytes", repr(size)[:80])
    return dtype, size
