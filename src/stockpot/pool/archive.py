"""Is this zip archive laid out as torch.save lays it out?

Memory-mapped loading trusts the archive's own bookkeeping: a storage is "so many bytes from there". Torch
does not check that the records are uncompressed, inside the file and apart from each other, that no storage
is larger than its record, and it does not compare checksums; so a damaged or hostile archive could yield bytes
of something else without a word. We check it before torch sees the file, all but the checksums of the tensors
themselves, which would mean to read everything.
"""

from __future__ import annotations

import os
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field
_LOCAL_SIGNATURE = b"PK\x03\x04"
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x08
_DESCRIPTOR_SIZES = (16, 24)  # the second form has 64-bit sizes
_STORAGE = re.compile(r"[^/]+/data/(\d+)")
_TABLE = re.compile(r"[^/]+/data\.pkl")
_PROGRAM = re.compile(r"[^/]+/constants\.pkl")
_END = b"PK\x05\x06"
_END_SIZE = 22
_MOST_TABLE = 16 * 2**20  # bytes; ten thousand tensors take two megabytes
_MOST_RECORDS = 1_000_000


@dataclass(frozen=True)
class Archive:
    """`table` is the pickle that says which tensors there are; `sizes` are the bytes of each storage by its key;
    `program` is true for TorchScript."""

    table: bytes
    sizes: Mapping[str, int]
    program: bool


class ArchiveError(Exception):
    """The reason why an archive cannot be trusted."""


def check_archive(path: Path) -> Archive:
    try:
        return _check(path)
    except (
        zipfile.BadZipFile,
        struct.error,
        EOFError,
        ValueError,
        NotImplementedError,
        OverflowError,
    ) as error:
        raise ArchiveError(str(error)) from error


def _check(path: Path) -> Archive:
    tables: list[bytes] = []
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        _check_directory(file, records)
        ends = [record.header_offset for record in records[1:]] + [archive.start_dir]
        for record, limit in zip(records, ends, strict=True):
            if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
                raise ArchiveError(f"record {record.filename!r} is compressed")
            file.seek(record.header_offset)
            signature, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            name = file.read(name_length)
            if signature != _LOCAL_SIGNATURE or name.decode("utf-8", "replace") != record.filename:
                raise ArchiveError(f"record {record.filename!r} is not where the directory says")
            start = record.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            end = start + record.file_size
            room = limit - end
            if record.flag_bits & _HAS_DESCRIPTOR:
                file.seek(max(end, 0))
                fits = room in _DESCRIPTOR_SIZES and file.read(4) == _DESCRIPTOR_SIGNATURE
            else:
                fits = room == 0
            if not fits:
                raise ArchiveError(f"record {record.filename!r} does not fill its place in the file")
            if _STORAGE.fullmatch(record.filename):
                continue
            # What says which bytes are which tensor is small and read anyway, so its checksum costs nothing.
            # Torch writes zero where the user has switched checksums off.
            file.seek(start)
            content = _small(file, record)
            if record.CRC and zlib.crc32(content) != record.CRC:
                raise ArchiveError(f"record {record.filename!r} does not have its checksum")
            if _TABLE.fullmatch(record.filename):
                tables.append(content)
    if len(tables) != 1:
        raise ArchiveError(f"{len(tables)} records data.pkl instead of one")
    return Archive(
        tables[0],
        {m[1]: record.file_size for record in records if (m := _STORAGE.fullmatch(record.filename))},
        any(_PROGRAM.fullmatch(record.filename) for record in records),
    )


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


def _small(file: BinaryIO, record: zipfile.ZipInfo) -> bytes:
    if record.file_size > _MOST_TABLE:
        raise ArchiveError(
            f"record {record.filename!r} has {record.file_size:,} bytes, too many to be a table"
        )
    return file.read(record.file_size)
