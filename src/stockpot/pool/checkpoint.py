"""One opened model, from a file or a Hugging Face directory: a lazy mapping of names to tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from stockpot.errors import CheckpointError, PoolError
from stockpot.files import read_json
from stockpot.pool.discover import weights_of
from stockpot.pool.safetensors_files import METADATA, open_safetensors
from stockpot.pool.source import (
    SAFETENSORS_SUFFIXES,
    SUFFIXES,
    TORCH_SUFFIXES,
    Checkpoint,
    is_directory,
    listed,
    natural_key,
    natural_order,
    reason,
    refusal,
    require_file,
    shown,
    stays_inside,
)
from stockpot.pool.torch_files import open_torch

Rename = Mapping[str, str] | Callable[[str], str]
WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel and torch.compile


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pauses the collector of cycles, which would go through a header of many tensors again and again for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def open_checkpoint(path: str | Path, key: str | None = None, rename: Rename | None = None) -> Checkpoint:
    """Open a file, or a Hugging Face directory, and read its headers."""
    check_rename(rename)
    path = Path(path)
    opened = _open(path, key)
    if not opened.specs:
        raise refusal(path, expected="a model", found="no tensors at all", fix="leave it out of the pool")
    stored = _new_names(opened.specs, rename, path)
    renamed = {old: new for new, old in stored.items()}
    return replace(
        opened,
        path=path,
        specs=MappingProxyType({name: opened.specs[stored[name]] for name in natural_order(tuple(stored))}),
        read=lambda name: opened.read(stored[name]),
        aliases=tuple(tuple(sorted((renamed[old] for old in group), key=natural_key)) for group in opened.aliases),
    )


def check_rename(rename: Rename | None) -> None:
    if rename is None or callable(rename):
        return
    if not isinstance(rename, Mapping) or not all(
        isinstance(old, str) and isinstance(new, str) for old, new in rename.items()
    ):
        raise PoolError.of(
            "rename",
            expected="a map of prefixes or a function",
            found=repr(rename)[:80],
            fix='give for example rename={"model.": ""}',
        )


def _open(path: Path, key: str | None) -> Checkpoint:
    suffix = path.suffix.lower()
    if is_directory(path):
        opened = _open_directory(path)
    elif suffix in TORCH_SUFFIXES:
        return open_torch(path, key)
    elif suffix in SAFETENSORS_SUFFIXES:
        opened = open_safetensors(path)
    else:
        require_file(path)
        raise refusal(
            path,
            expected=f"a file that ends in one of {', '.join(SUFFIXES)}, or a Hugging Face directory",
            found=f"the ending {suffix!r}" if suffix else "no ending",
            fix="rename the file to what it is, or convert it to safetensors",
        )
    if key is not None:
        raise refusal(
            path,
            expected=f"weights under the key {key!r}",
            found=f"a flat checkpoint ({opened.format}), in which nothing is nested",
            fix="open it without a key",
        )
    return opened


# Names ------------------------------------------------------------------------------------------------------


def _new_names(stored_names: Iterable[str], rename: Rename | None, path: Path) -> dict[str, str]:
    """Pool name -> name in the file."""
    names = list(stored_names)
    prefix = _wrapper_prefix(names)
    result: dict[str, str] = {}
    clashes: list[str] = []
    for stored in names:
        name = _renamed(stored[len(prefix) :], rename, path)
        problem = _unusable(name)
        if problem:
            raise refusal(
                path,
                expected=problem,
                found=repr(name)[:120],
                fix="rename the tensor where the file was made, or leave this file out of the pool",
            )
        if name in result:
            clashes.append(f"{result[name]!r} and {stored!r} both become {name!r}")
        result[name] = stored
    if clashes:
        raise refusal(
            path, expected="different names after renaming", found=listed(clashes, 3), fix="make rename more specific"
        )
    return result


def _wrapper_prefix(names: Sequence[str]) -> str:
    """What wrappers put before every single name; empty when only some names have it."""
    end = 0
    wrapper: str | None = ""
    while wrapper is not None:
        end += len(wrapper)
        fitting = (w for w in WRAPPERS if all(n.startswith(w, end) and len(n) > end + len(w) for n in names))
        wrapper = next(fitting, None)
    return names[0][:end]


def _unusable(name: str) -> str | None:
    """What was expected of a name that no soup could be written with; None for all others."""
    if name == METADATA:
        return "names of tensors that a safetensors file can have (it keeps this one for itself)"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair is no text
        return "names of tensors that are valid text"
    return None


def _renamed(name: str, rename: Rename | None, path: Path) -> str:
    if rename is None:
        return name
    if isinstance(rename, Mapping):
        matching = [old for old in rename if name.startswith(old)]
        if not matching:
            return name
        old = max(matching, key=len)
        new: object = rename[old] + name[len(old) :]
    else:
        new = rename(name)
    if not isinstance(new, str) or not new:
        raise refusal(
            path,
            expected=f"a name for the tensor {name!r} from rename",
            found=repr(new),
            fix="let rename return a text that is not empty",
        )
    return new


# Directories in the form that Hugging Face libraries write: one file, or shards with an index ----------------


def _open_directory(directory: Path) -> Checkpoint:
    try:
        weights = weights_of(directory)
    except OSError as error:
        raise refusal(
            directory, expected="a checkpoint directory", found=reason(error), fix="check the path and its permissions"
        ) from error
    if weights is None:
        raise refusal(
            directory,
            expected="a Hugging Face directory (model.safetensors, pytorch_model.bin or an index)",
            found="none of these files in it",
            fix="give the path of one checkpoint; a folder of several is a pool (Pool.open, `stockpot inspect`)",
        )
    return _open_shards(directory, weights) if weights.name.endswith(".index.json") else _open_file(weights)


def _open_file(path: Path) -> Checkpoint:
    return open_safetensors(path) if path.name.endswith(SAFETENSORS_SUFFIXES) else open_torch(path)


def _open_shards(directory: Path, index: Path) -> Checkpoint:
    where = _read_index(index)
    suffix = ".safetensors" if ".safetensors." in index.name else ".bin"
    shards: dict[str, Checkpoint] = {}
    problems: list[str] = []
    for name in sorted(set(where.values())):
        try:
            _check_shard_name(directory, name, suffix)
            shards[name] = _open_file(directory / name)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(problems))
    _check_agreement(index, where, shards)
    return Checkpoint(
        directory,
        "safetensors-sharded" if suffix == ".safetensors" else "torch-sharded",
        (index, *(directory / name for name in shards)),
        {name: shards[shard].specs[name] for name, shard in where.items()},
        read=lambda name: shards[where[name]].read(name),
        aliases=tuple(group for shard in shards.values() for group in shard.aliases),
        ignored=tuple(name for shard in shards.values() for name in shard.ignored),
    )


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name -> name of the shard."""
    try:
        require_file(index)
        content = read_json(index, follow=True)  # in the Hugging Face cache the files are links
        where = content.get("weight_map") if isinstance(content, dict) else None
        if isinstance(where, dict) and where and all(isinstance(name, str) for name in where.values()):
            return where
        found = "JSON without a weight_map of tensor names to file names"
    except (OSError, ValueError) as error:
        found = f"no valid JSON ({reason(error)})"
    raise refusal(index, expected="an index of shards", found=found, fix="download the directory again")


def _check_shard_name(directory: Path, name: str, suffix: str) -> None:
    """An index may only speak of its own directory."""
    expected, found = "plain names of files in this directory", None
    if not name.endswith(suffix) or name != Path(name).name or any(mark in name for mark in "/\\:\0"):
        expected, found = f"{expected}, ending in {suffix}", repr(name)[:120]
    elif not stays_inside(directory, name):
        found = f"{name!r}, a link out of it"
    if found is not None:
        raise refusal(
            f"{shown(directory)}, index of shards",
            expected=expected,
            found=found,
            fix="do not use this directory unless you know why it points elsewhere; download it again",
        )


def _check_agreement(index: Path, where: Mapping[str, str], shards: Mapping[str, Checkpoint]) -> None:
    lies = [f"{name!r} is not in {shard}" for name, shard in where.items() if name not in shards[shard].specs]
    lies += [
        f"{name!r} in {shard} is not listed"
        for shard, source in shards.items()
        for name in source.specs
        if where.get(name) != shard
    ]
    if lies:
        raise refusal(
            index,
            expected="an index that agrees with its shards",
            found=listed(lies, 3),
            fix="download or save the directory again; index and shards are from different models",
        )
