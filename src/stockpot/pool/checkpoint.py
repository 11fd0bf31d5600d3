"""One opened model, from a file or a Hugging Face directory: a lazy mapping of names to tensors.

Of safetensors files the library checks most of the header itself, in ways that differ from version to version. What it
does not see is a name that appears twice: it keeps one of the two. So all of it is checked here before the library
sees the file.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from safetensors import safe_open

from stockpot.errors import CheckpointError, PoolError
from stockpot.files import parse_json, read_json
from stockpot.pool import source
from stockpot.pool.discover import weights_of
from stockpot.pool.distributed_folders import TABLE, open_distributed
from stockpot.pool.source import Checkpoint, TensorSpec, listed, natural_key, natural_order, reason, refusal, spec_of
from stockpot.pool.torch_files import open_torch

Rename = Mapping[str, str] | Callable[[str], str]
_WRAPPERS = re.compile(r"(module\.|_orig_mod\.)*")  # DistributedDataParallel and torch.compile

METADATA = "__metadata__"  # an entry of the header that is no tensor
_MOST_HEADER = 100_000_000  # bytes; the library's own limit
_LARGEST = 2**62  # bytes and elements; what any file could have
# Names as in the header. Sub-byte types (F4, F6) pack several values in a byte, so that their shapes do not mean
# what ours mean; they are left out on purpose.
_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "C64": "complex64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
# The newest float8 types are missing in older torch.
_DTYPES: dict[str, torch.dtype] = {n: getattr(torch, name) for n, name in _NAMES.items() if hasattr(torch, name)}
# The library writes wide types first, so that all of them are aligned: this order, backwards.
_ORDER = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16"),
    *("I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)


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
def open_checkpoint(path: str | Path | Checkpoint, key: str | None = None, rename: Rename | None = None) -> Checkpoint:
    """Open a file, or a Hugging Face directory, and read its headers. What is in memory is given as a checkpoint."""
    check_rename(rename)
    if isinstance(path, Checkpoint):
        opened, path = path, path.path
    else:
        path = Path(path)
        opened = _open(path, key)
    if not opened.specs:
        raise refusal(path, "a model", "no tensors at all", "leave it out of the pool")
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
    if not isinstance(rename, Mapping) or not all(isinstance(text, str) for pair in rename.items() for text in pair):
        expected, fix = "a map of prefixes or a function", 'give for example rename={"model.": ""}'
        raise PoolError.of("rename", expected=expected, found=repr(rename)[:80], fix=fix)


def _open(path: Path, key: str | None) -> Checkpoint:
    suffix = source.suffix_of(path)
    if source.is_directory(path):
        if (weights := _weights_in(path)).name == TABLE:
            return open_distributed(path, key)
        opened = _open_shards(path, weights) if weights.name.endswith(".index.json") else _open_file(weights)
    elif suffix in source.TORCH_SUFFIXES:
        return open_torch(path, key)
    elif suffix in source.SAFETENSORS_SUFFIXES:
        opened = open_safetensors(path)
    else:
        source.require_file(path)
        expected = f"a file that ends in one of {', '.join(source.SUFFIXES)}, or a Hugging Face directory"
        found = f"the ending {suffix!r}" if suffix else "no ending"
        raise refusal(path, expected, found, "rename the file to what it is, or convert it to safetensors")
    if key is not None:
        found = f"a flat checkpoint ({opened.format}), in which nothing is nested"
        raise refusal(path, f"weights under the key {key!r}", found, "open it without a key")
    return opened


# ---- names


def _new_names(stored_names: Iterable[str], rename: Rename | None, path: Path) -> dict[str, str]:
    """Pool name -> name in the file."""
    names = list(stored_names)
    # What wrappers put before every single name, so that something is left of each.
    common = os.path.commonprefix(names)[: min(map(len, names)) - 1]  # noqa: RUF071  (letter by letter)
    prefix = (_WRAPPERS.match(common) or [""])[0]
    result: dict[str, str] = {}
    clashes: list[str] = []
    for stored in names:
        name = _renamed(stored[len(prefix) :], rename, path)
        if problem := _unusable(name):
            fix = "rename the tensor where the file was made, or leave this file out of the pool"
            raise refusal(path, problem, repr(name)[:120], fix)
        if name in result:
            clashes.append(f"{result[name]!r} and {stored!r} both become {name!r}")
        result[name] = stored
    if clashes:
        raise refusal(path, "different names after renaming", listed(clashes, 3), "make rename more specific")
    return result


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
    if isinstance(rename, Mapping):
        old = max((old for old in rename if name.startswith(old)), key=len, default=None)
        new: object = name if old is None else rename[old] + name[len(old) :]
    else:
        new = name if rename is None else rename(name)
    if rename is not None and (not isinstance(new, str) or not new):
        expected = f"a name for the tensor {name!r} from rename"
        raise refusal(path, expected, repr(new), "let rename return a text that is not empty")
    return str(new)


# ---- directories in the form that Hugging Face libraries write: one file, or shards with an index


def _weights_in(directory: Path) -> Path:
    try:
        weights = weights_of(directory)
    except OSError as error:
        fix = "check the path and its permissions"
        raise refusal(directory, "a checkpoint directory", reason(error), fix) from error
    if weights is None:
        expected = "a Hugging Face directory (model.safetensors, pytorch_model.bin or an index)"
        fix = "give the path of one checkpoint; a folder of several is a pool (Pool.open, `stockpot inspect`)"
        raise refusal(directory, expected, "none of these files in it", fix)
    return weights


def _open_file(path: Path) -> Checkpoint:
    return open_safetensors(path) if path.name.endswith(source.SAFETENSORS_SUFFIXES) else open_torch(path)


def _open_shards(directory: Path, index: Path) -> Checkpoint:
    where = _read_index(index)
    kind, suffix = ("safetensors", ".safetensors") if ".safetensors." in index.name else ("torch", ".bin")
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
    lies = [f"{name!r} is not in {shard}" for name, shard in where.items() if name not in shards[shard].specs]
    for shard, opened in shards.items():
        lies += [f"{name!r} in {shard} is not listed" for name in opened.specs if where.get(name) != shard]
    if lies:
        fix = "download or save the directory again; index and shards are from different models"
        raise refusal(index, "an index that agrees with its shards", listed(lies, 3), fix)
    return Checkpoint(
        directory,
        f"{kind}-sharded",
        (index, *(directory / name for name in shards)),
        {name: shards[shard].specs[name] for name, shard in where.items()},
        read=lambda name: shards[where[name]].read(name),
        aliases=tuple(group for shard in shards.values() for group in shard.aliases),
        ignored=tuple(name for shard in shards.values() for name in shard.ignored),
    )


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name -> name of the shard."""
    try:
        source.require_file(index)
        content = read_json(index, follow=True)  # in the Hugging Face cache the files are links
        where = content.get("weight_map") if isinstance(content, dict) else None
        if isinstance(where, dict) and where and all(isinstance(name, str) for name in where.values()):
            return where
        found = "JSON without a weight_map of tensor names to file names"
    except (OSError, ValueError) as error:
        found = f"no valid JSON ({reason(error)})"
    raise refusal(index, "an index of shards", found, "download the directory again")


def _check_shard_name(directory: Path, name: str, suffix: str) -> None:
    """An index may only speak of its own directory."""
    expected = "plain names of files in this directory"
    if not name.endswith(suffix) or name != Path(name).name or any(mark in name for mark in "/\\:\0"):
        expected, found = f"{expected}, ending in {suffix}", repr(name)[:120]
    elif not source.stays_inside(directory, name):
        found = f"{name!r}, a link out of it"
    else:
        return
    fix = "do not use this directory unless you know why it points elsewhere; download it again"
    raise refusal(f"{source.shown(directory)}, index of shards", expected, found, fix)


# ---- safetensors files


class HeaderError(Exception):
    """What cannot be true."""


def open_safetensors(path: Path) -> Checkpoint:
    size = source.require_file(path)
    try:
        header = read_header(path, size)
        handle: Any = safe_open(path, framework="pt", device="cpu")
    except Exception as error:  # whatever a hostile header provokes, the user gets our error
        found = source.looks_like(path)
        fix = "give the file its right ending (.pt for files of torch.save), or download it again"
        if found in (source.SAFETENSORS, source.UNKNOWN):
            found, fix = f"a damaged or truncated one ({reason(error)})", source.COPY_AGAIN
        raise refusal(path, "a whole safetensors file", found, fix) from error
    if unknown := sorted({entry["dtype"] for entry in header.values()} - _DTYPES.keys()):
        fix = "convert the checkpoint to one of these types (for example bfloat16) and open that"
        raise refusal(path, f"tensors of the types {', '.join(_DTYPES)}", ", ".join(unknown), fix)
    specs = {name: spec_of(_DTYPES[e["dtype"]], tuple(e["shape"])) for name, e in header.items()}
    return Checkpoint(path, "safetensors", (path,), specs, handle.get_tensor)


def read_header(path: Path, size: int) -> dict[str, Any]:
    """The entries of all tensors, which fill the file without holes or overlaps; HeaderError where they do not."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MOST_HEADER, size - 8):
            raise HeaderError(f"a header of {length:,} bytes in a file of {size:,}")
        text = file.read(length)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise HeaderError(f"a header that is no valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise HeaderError("a header that is no table of tensors")
    header.pop(METADATA, None)
    end = 0
    for start, stop, name in sorted(_stretch(name, entry) for name, entry in header.items()):
        if start != end:
            raise HeaderError(f"data of {name[:80]!r} that starts at byte {start:,}, not at {end:,}")
        end = stop
    if 8 + length + end != size:
        raise HeaderError(f"{size:,} bytes where the header speaks of {8 + length + end:,}")
    return header


def header_of(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, as the library writes it, and where behind it each tensor begins."""
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    order = sorted(specs, key=lambda name: (-_ORDER.index(codes[specs[name].dtype]), name.encode()))
    places: dict[str, int] = {}
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name in order:
        spec, places[name] = specs[name], end
        end += spec.nbytes
        offsets = [places[name], end]
        entries[name] = {"dtype": codes[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _stretch(name: str, entry: Any) -> tuple[int, int, str]:
    """Where the data of one tensor begins and ends."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
        raise HeaderError(f"no type, shape and place for {name[:80]!r}")
    start, stop = offsets
    # A length of zero may stand beside lengths that no tensor can have.
    if start > stop or math.prod(n for n in shape if n) > _LARGEST:
        raise HeaderError(f"a shape or place that {name[:80]!r} cannot have")
    return start, stop, name


def _whole(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= _LARGEST for n in value)
