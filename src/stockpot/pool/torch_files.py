"""Files of torch.save: is the archive one that can be trusted, and then torch opens it.

Memory-mapped loading trusts the archive's own bookkeeping: a storage is "so many bytes from there". Torch does not
check that the records are uncompressed, inside the file and apart from each other, that no storage is larger than its
record, and it does not compare checksums; so a damaged or hostile archive could yield bytes of something else without a
word. All of it is checked before torch sees the file, but for the checksums of the tensors themselves, which would mean
to read everything. This file has the only call of torch.load: weights only, memory-mapped, with no way around it.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from stockpot.errors import CheckpointError
from stockpot.pool import source
from stockpot.pool.nesting import Weights, find_weights, shown_key
from stockpot.pool.pickles import CodeError, check_table
from stockpot.pool.source import COPY_AGAIN, Checkpoint, reason, refusal, shown, spec_of

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field
_LOCAL_SIGNATURE, _DESCRIPTOR_SIGNATURE, _END = b"PK\x03\x04", b"PK\x07\x08", b"PK\x05\x06"
_HAS_DESCRIPTOR = 0x08
_DESCRIPTOR_SIZES = (16, 24)  # the second form has 64-bit sizes
_END_SIZE = 22
_STORAGE = re.compile(r"[^/]+/data/(\d+)")
_TABLE = re.compile(r"[^/]+/data\.pkl")
_PROGRAM = re.compile(r"[^/]+/constants\.pkl")
_MOST_TABLE = 16 * 2**20  # bytes; ten thousand tensors take two megabytes
_MOST_RECORDS = 1_000_000
_MOST_NAMES = 64
_SCRIPT = "a TorchScript program"
_SAVE_AGAIN = (
    "if you trust its origin, load it where it was made and save it again with "
    "safetensors.torch.save_file(state_dict, 'model.safetensors') or torch.save(state_dict, path)"
)


class ArchiveError(Exception):
    """The reason why an archive cannot be trusted."""


def open_torch(path: Path, key: str | None = None) -> Checkpoint:
    size = source.require_file(path)
    opened = _checkpoint(path, "torch", (path,), find_weights(_load(path), key, path), size)
    # Many names for one stretch of data are fine, within reason: a soup is written as large as its names say.
    if opened.nbytes > _MOST_NAMES * max(size, 2**20):
        expected = f"at most {_MOST_NAMES} times as many bytes of tensors as the file has"
        fix = "save it with contiguous() tensors, or leave this file out of the pool"
        raise refusal(path, expected, f"{opened.nbytes:,} bytes in a file of {size:,}", fix)
    return opened


def in_memory(state: Mapping[Any, Any], path: Path) -> Checkpoint:
    """A state dict that is in memory already; `path` is what it is called."""
    weights, place = find_weights(state, None, path)
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    here = {name: value.detach() if value.is_meta else value.detach().cpu() for name, value in tensors.items()}
    return _checkpoint(path, "memory", (), (here, place), 2**62)


def _checkpoint(path: Path, kind: str, files: tuple[Path, ...], found: Weights, size: int) -> Checkpoint:
    weights, place = found
    usable = {name: value for name, value in weights.items() if isinstance(name, str) and isinstance(value, Tensor)}
    tensors = {name: _plain(value, name, path, size) for name, value in usable.items()}
    specs = {name: spec_of(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    ignored = tuple(shown_key(name) for name in weights if name not in usable)
    return Checkpoint(path, kind, files, specs, tensors.__getitem__, _aliases(tensors), place, ignored=ignored)


def values_of(path: Path) -> Mapping[Any, Any]:
    """What is in a file of torch.save, by its outermost names; nothing where it has none."""
    source.require_file(path)
    loaded = _load(path)
    return loaded if isinstance(loaded, Mapping) else {}


def _load(path: Path) -> object:
    looks = source.looks_like(path)
    if looks != source.ZIP:
        fixes = {source.PICKLE: _SAVE_AGAIN, source.SAFETENSORS: "rename it so that it ends in .safetensors"}
        raise refusal(path, "the zip format that torch.save has written since 1.6", looks, fixes.get(looks, COPY_AGAIN))
    try:
        with path.open("rb") as file:
            check_table(*_check_archive(file))
        loaded = _checked(path)
    except Exception as error:  # whatever a hostile file provokes, the user gets our error
        raise _refused(path, error) from error
    return _without_attributes(loaded)


def read_piece(path: Path, offset: int, length: int, name: str) -> Tensor:
    """One tensor of torch.save that lies in a larger file, read into memory."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            piece = io.BytesIO(file.read(length))
        check_table(*_check_archive(piece))
        piece.seek(0)
        loaded = _checked(piece)
    except Exception as error:
        raise _refused(path, error) from error
    if not isinstance(loaded, Tensor):
        raise refusal(path, f"a tensor where {shown(name)[:200]!r} is", type(loaded).__name__, COPY_AGAIN)
    return _plain(loaded, name, path, length)


def _checked(archive: Path | io.BytesIO) -> object:
    """What torch makes of an archive that was checked; of a file it reads tensors when they are used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes on deprecated storages inside old files
        loaded: object = torch.load(archive, map_location="cpu", weights_only=True, mmap=isinstance(archive, Path))
    return loaded


def _refused(path: Path, error: Exception) -> CheckpointError:
    expected = "a whole file of torch.save"
    if isinstance(error, ArchiveError):
        return refusal(path, expected, f"a damaged or truncated archive ({reason(error)})", COPY_AGAIN)
    if not isinstance(error, CodeError):
        found = f"something torch cannot read as weights ({_last_reason(error)})"
        return refusal(path, expected, found, f"{_SAVE_AGAIN}; or {COPY_AGAIN}")
    what = error.name
    if what != _SCRIPT:
        what = f"the file asks for {shown(what)[:200]}, which is not plain tensor data"
    return refusal(
        path,
        "tensors and plain values only",
        f"{what}; opening it would run code from the file, so it was refused and nothing was run",
        "if you trust its origin, load it where it was made and save only its state_dict, best with "
        "safetensors.torch.save_file; if you do not, delete it",
    )


def _last_reason(error: Exception) -> str:
    """Torch puts advice to switch the protection off around the reason. That advice must not reach anyone here."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "weights_only" not in line]
    if not lines:
        return type(error).__name__
    return shown(lines[-1].rpartition("WeightsUnpickler error: ")[2].rstrip("."))[:200]


def _without_attributes(loaded: object) -> object:
    """An OrderedDict's own attributes come from the file too, and would stand before its methods."""
    todo, seen = [loaded], set[int]()
    while todo:
        thing = todo.pop()
        if isinstance(thing, dict) and id(thing) not in seen:
            seen.add(id(thing))
            if isinstance(thing, OrderedDict):
                thing.__dict__.clear()
            todo += dict.values(thing)
    return loaded


def _plain(value: Tensor, name: str, path: Path, size: int) -> Tensor:
    """The bare strided CPU tensor; anything that cannot be averaged element by element is refused."""
    if type(value) not in (Tensor, nn.Parameter):
        problem = f"a {type(value).__name__}"
    elif value.is_nested:
        problem = "a nested tensor"
    elif value.layout != torch.strided:
        problem = f"a sparse tensor ({str(value.layout).removeprefix('torch.')})"
    elif value.is_quantized:
        problem = f"a quantised tensor ({source.dtype_name(value.dtype)})"
    elif value.device.type != "cpu":
        problem = f"a tensor without data (device {value.device.type})"
    elif math.prod(value.shape) * value.dtype.itemsize > max(size, 4096):
        # A stride of zero lets a file of a kilobyte declare a terabyte.
        problem = f"a shape {list(value.shape)} with more data than the whole file"
    else:
        # By the class: attributes of the tensor itself come from the file.
        return Tensor.resolve_neg(Tensor.resolve_conj(Tensor.detach(value)))
    fix = "save it dense (contiguous(), to_dense(), dequantize()), or leave this file out of the pool"
    raise refusal(f"{shown(path)}, tensor {shown(name)[:200]!r}", "an ordinary dense tensor", problem, fix)


def _aliases(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    """Names that are one tensor in the file. Views of different parts of a storage are different tensors."""
    places: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel():
            places[tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()].append(name)
    return tuple(tuple(names) for names in places.values() if len(names) > 1)


def _check_archive(file: BinaryIO) -> tuple[bytes, dict[str, int]]:
    """The table that says which tensors there are, and the bytes of each storage by its key."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.header_offset)
            if any(_PROGRAM.fullmatch(record.filename) for record in records):
                raise CodeError(_SCRIPT)
            _check_directory(file, records)
            ends = [record.header_offset for record in records[1:]] + [archive.start_dir]
            contents = [_check_record(file, *pair) for pair in zip(records, ends, strict=True)]
    except (zipfile.BadZipFile, struct.error, EOFError, ValueError, NotImplementedError, OverflowError) as error:
        raise ArchiveError(str(error)) from error
    tables = [content for record, content in zip(records, contents, strict=True) if _TABLE.fullmatch(record.filename)]
    if len(tables) != 1:
        raise ArchiveError(f"{len(tables)} records data.pkl instead of one")
    return tables[0], {m[1]: r.file_size for r in records if (m := _STORAGE.fullmatch(r.filename))}


def _check_directory(file: BinaryIO, records: list[zipfile.ZipInfo]) -> None:
    if not records or len(records) > _MOST_RECORDS:
        raise ArchiveError(f"{len(records):,} records")
    # Readers of zip files differ in what they make of bytes before the first record and after the last.
    if records[0].header_offset != 0:
        raise ArchiveError("it does not start with its first record")
    file.seek(-_END_SIZE, os.SEEK_END)
    if not file.read(_END_SIZE).startswith(_END):
        raise ArchiveError("it does not end with its directory")
    # The reader inside torch ignores case, so names that differ only in case are one record to it.
    if len({record.filename.casefold() for record in records}) != len(records):
        raise ArchiveError("two records have the same name")
    if len({record.filename.partition("/")[0] for record in records}) != 1:
        raise ArchiveError("its records are not in one folder")


def _check_record(file: BinaryIO, record: zipfile.ZipInfo, limit: int) -> bytes:
    """The content of a record, of a storage nothing; ArchiveError unless the record ends where the next one starts."""
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
        raise ArchiveError(f"record {record.filename!r} is compressed")
    file.seek(record.header_offset)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    name = file.read(name_length)
    if signature != _LOCAL_SIGNATURE or name.decode("utf-8", "replace") != record.filename:
        raise ArchiveError(f"record {record.filename!r} is not where the directory says")
    start = record.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    end = start + record.file_size
    fits = limit == end
    if record.flag_bits & _HAS_DESCRIPTOR:
        file.seek(max(end, 0))
        fits = limit - end in _DESCRIPTOR_SIZES and file.read(4) == _DESCRIPTOR_SIGNATURE
    if not fits:
        raise ArchiveError(f"record {record.filename!r} does not fill its place in the file")
    if _STORAGE.fullmatch(record.filename):
        return b""
    # What says which bytes are which tensor is small and read anyway, so its checksum costs nothing.
    # Torch writes zero where the user has switched checksums off.
    if record.file_size > _MOST_TABLE:
        raise ArchiveError(f"record {record.filename!r} has {record.file_size:,} bytes, too many to be a table")
    file.seek(start)
    content = file.read(record.file_size)
    if record.CRC and zlib.crc32(content) != record.CRC:
        raise ArchiveError(f"record {record.filename!r} does not have its checksum")
    return content
