"""Zip files that are not what torch.save writes: bombs, lies about places and names."""

from __future__ import annotations

import struct
import warnings
import zipfile
from pathlib import Path

from attacks.kit import FLOATS, Threat, archive, records, table, tensor, text, threat

ARCHIVES: list[Threat] = []
_HONEST = table((text(b"w"), tensor()))


def _patched(path: Path, name: str, place: int, value: bytes, *, central: bool) -> Path:
    """Overwrite bytes in a record's local header, or in its entry of the central directory."""
    content = bytearray(path.read_bytes())
    signature, skip = (b"PK\x01\x02", 46) if central else (b"PK\x03\x04", 30)
    at = content.find(signature)
    while content[at + skip : at + skip + len(name)] != name.encode():
        at = content.find(signature, at + 1)
    content[at + place : at + place + len(value)] = value
    path.write_bytes(content)
    return path


@threat("bomb: 160 MB of zeros in 160 KB", "is compressed", ARCHIVES)
def compressed_bomb(folder: Path) -> Path:
    path = folder / "m.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, content in records(_HONEST).items():
            if name != "data/0":
                file.writestr(f"m/{name}", content)
        with file.open("m/data/0", "w") as stream:
            for _ in range(160):
                stream.write(bytes(2**20))
    return path


@threat("bomb: records that overlap", "does not fill its place", ARCHIVES)
def overlapping_records(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST, {"data/1": FLOATS})
    with zipfile.ZipFile(path) as file:
        first = file.getinfo("m/data/0").header_offset
    return _patched(path, "m/data/1", 42, struct.pack("<I", first), central=True)


@threat("lie: a size beyond the end of the file", "does not fill its place", ARCHIVES)
def size_beyond_the_end(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST)
    return _patched(path, "m/data/0", 20, struct.pack("<II", 2**31, 2**31), central=True)


@threat("lie: an offset beyond the end of the file", "damaged or truncated archive", ARCHIVES)
def offset_beyond_the_end(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST)
    return _patched(path, "m/data/0", 42, struct.pack("<I", 2**31), central=True)


@threat("lie: a local header under another name", "is not where the directory says", ARCHIVES)
def other_local_name(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST, {"data/1": bytes(16)})
    return _patched(path, "m/data/0", 30, b"m/data/1", central=False)


@threat("lie: a table that does not have its checksum", "does not have its checksum", ARCHIVES)
def wrong_checksum(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST)
    return _patched(path, "m/data.pkl", 16, b"\1\2\3\4", central=True)


@threat("names: one record twice", "two records have the same name", ARCHIVES)
def duplicate_records(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as file:
        warnings.simplefilter("ignore")
        file.writestr("m/data/0", bytes(16))
    return path


@threat("names: records that lead out of the folder", "not in one folder", ARCHIVES)
def traversal(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("../../evil", b"x")
        file.writestr("/etc/evil", b"x")
    return path


@threat("names: a record that is a link", None, ARCHIVES)
def link_record(folder: Path) -> Path:
    """Harmless: nothing is ever unpacked."""
    path = archive(folder / "m.pt", _HONEST)
    with zipfile.ZipFile(path, "a") as file:
        info = zipfile.ZipInfo("m/link")
        info.external_attr = 0o120777 << 16
        file.writestr(info, "/etc/passwd")
    return path


@threat("names: bytes that are no text", "damaged or truncated archive", ARCHIVES)
def unreadable_name(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST, {"zzzz": b""})
    content = path.read_bytes().replace(b"m/zzzz", b"m/\xff\xfe\xfd\xfc")
    path.write_bytes(content)
    return path


@threat("place: bytes before the first record", "does not start with its first record", ARCHIVES)
def prepended(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST)
    path.write_bytes(b"PK\x03\x04" + bytes(60) + path.read_bytes())
    return path


@threat("place: a second archive after the first", "damaged or truncated archive", ARCHIVES)
def appended(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST)
    path.write_bytes(path.read_bytes() * 2)
    return path


@threat("place: a comment after the directory", "does not end with its directory", ARCHIVES)
def commented(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST)
    with zipfile.ZipFile(path, "a") as file:
        file.comment = b"one more"
    return path


@threat("no table at all", "0 records data.pkl instead of one", ARCHIVES)
def no_table(folder: Path) -> Path:
    path = folder / "m.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("m/data/0", FLOATS)
    return path


@threat("an encrypted record", "cannot read as weights", ARCHIVES)
def encrypted(folder: Path) -> Path:
    path = archive(folder / "m.pt", _HONEST)
    return _patched(path, "m/data.pkl", 8, b"\x01\x00", central=True)
