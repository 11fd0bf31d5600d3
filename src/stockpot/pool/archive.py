"""Is this zip archive laid out as torch.save lays it out?

Memory-mapped loading trusts the archive's own bookkeeping: a storage is "so many bytes from there". Torch
does not check that the records are uncompressed, inside the file and apart from each other, so a damaged or
hostile archive could yield bytes of something else without a word. We check it before torch sees the file.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from pathlib import Path

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field
_LOCAL_SIGNATURE = b"PK\x03\x04"
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x08
_DESCRIPTOR_SIZES = (16, 24)  # the second form has 64-bit sizes
_STORAGE = re.compile(r"/data/\d+$")


class ArchiveError(Exception):
    """The reason why an archive cannot be trusted."""


def check_archive(path: Path) -> None:
    try:
        _check(path)
    except (zipfile.BadZipFile, struct.error, EOFError) as error:
        raise ArchiveError(str(error)) from error


def _check(path: Path) -> None:
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        # The reader inside torch ignores case, so names that differ only in case are one record to it.
        if len({record.filename.casefold() for record in records}) != len(records):
            raise ArchiveError("two records have the same name")
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
            # What says which bytes are which tensor is small and read anyway, so its checksum costs nothing.
            # Torch writes zero where the user has switched checksums off.
            if record.CRC and not _STORAGE.search(record.filename):
                file.seek(start)
                if zlib.crc32(file.read(record.file_size)) != record.CRC:
                    raise ArchiveError(f"record {record.filename!r} does not have its checksum")
