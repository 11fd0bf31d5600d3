"""What every threat is made of: a payload that would leave a marker, archives written by hand, a list of threats."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Threat:
    """`make` writes the threat into a folder and returns what a user would open.

    `words` must be in our error; None: it is opened, harmlessly. `payload` is a live pickle that leaves the marker
    when it is loaded without care.
    """

    name: str
    make: Callable[[Path], Path]
    words: str | None
    payload: Callable[[Path], bytes] | None = None

    def __str__(self) -> str:
        return self.name


def threat(
    name: str, words: str | None, into: list[Threat], payload: Callable[[Path], bytes] | None = None
) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    def register(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
        into.append(Threat(name, make, words, payload))
        return make

    return register


def marker_in(folder: Path) -> Path:
    return folder / "marker"


def command(folder: Path) -> bytes:
    return f"touch {marker_in(folder)}".encode()


def text(value: bytes) -> bytes:
    """BINUNICODE."""
    return b"X" + struct.pack("<I", len(value)) + value


def number(value: int) -> bytes:
    """LONG1."""
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


FLOATS = struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)


def tensor(key: bytes = b"0", count: int = 4, shape: bytes = b"K\x04\x85", stride: bytes = b"K\x01\x85") -> bytes:
    """The instructions for a tensor of four numbers, as torch.save writes them."""
    storage = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(key) + text(b"cpu") + number(count) + b"tQ"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"K\x00"
        + shape
        + stride
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def table(*pairs: tuple[bytes, bytes]) -> bytes:
    """A pickled dict of already pickled keys and values."""
    return b"\x80\x02}(" + b"".join(key + value for key, value in pairs) + b"u."


def records(payload: bytes) -> dict[str, bytes]:
    return {"data.pkl": payload, "version": b"3\n", "byteorder": b"little", "data/0": FLOATS}


def archive(
    path: Path, payload: bytes, more: Mapping[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED
) -> Path:
    """A file of torch.save around any pickle, with right checksums."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in {**records(payload), **(more or {})}.items():
            # The same date always: read as a pickle, its bytes could say anything. These are no ASCII.
            file.writestr(zipfile.ZipInfo(f"m/{name}", (2024, 1, 1, 16, 0, 0)), content, compression)
    return path


def header(path: Path, text_of_header: bytes, data: bytes = FLOATS, length: int | None = None) -> Path:
    """A safetensors file around any header."""
    size = len(text_of_header) if length is None else length
    path.write_bytes(struct.pack("<Q", size % 2**64) + text_of_header + data)
    return path


def entry(start: int = 0, stop: int = 16, shape: Iterable[int] = (4,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def shards(folder: Path, index: bytes | Mapping[str, object]) -> Path:
    """A Hugging Face directory with two honest shards, a and b, and any index."""
    folder.mkdir(exist_ok=True)
    for name in ("a", "b"):
        save_file({name: torch.arange(4.0)}, folder / f"model-{name}.safetensors")
    content = index if isinstance(index, bytes) else json.dumps({"weight_map": dict(index)}).encode()
    (folder / "model.safetensors.index.json").write_bytes(content)
    return folder
