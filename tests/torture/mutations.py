"""Checkpoints to be damaged, and a seeded mutator that knows their formats."""

from __future__ import annotations

import json
import pickletools
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from torture import decoders
from torture.decoders import Tensors

Mutation = Callable[[bytearray, random.Random], None]


@dataclass(frozen=True)
class Original:
    """A checkpoint, which of its files may be damaged, and what an honest reader finds in it."""

    name: str
    path: Path
    targets: tuple[str, ...]  # relative to the folder of a directory; one empty text for a file
    read: Callable[[Path, str | None], Tensors]  # the key is where in a nested file the weights are
    key: str | None = None
    openable: bool = True  # legacy files are refused whole and stay refused damaged


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "encoder.weight": torch.randn(6, 5, generator=generator),
        "encoder.bias": torch.arange(6.0),
        "half": torch.randn(7, generator=generator).half(),
        "brain": torch.randn(3, 3, generator=generator).bfloat16(),
        "double": torch.randn(2, 2, generator=generator).double(),
        "steps": torch.tensor(12),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }


def originals(folder: Path) -> list[Original]:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = state()
    base = tensors["encoder.weight"]
    views = {**tensors, "turned": base.t(), "tied": base, "part": base[1:3, ::2]}
    nested = {"state_dict": tensors, "optimizer": {"lr": 0.1, "betas": (0.9, 0.99), "x": torch.zeros(3)}, "epoch": 3}
    save_file(tensors, folder / "a.safetensors", {"format": "pt", "note": "some words"})
    torch.save(views, folder / "b.pt")
    torch.save(nested, folder / "c.ckpt")
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save(tensors, folder / "d.pth")
    torch.serialization.set_crc32_options(before)
    torch.save(tensors, folder / "e.pt", _use_new_zipfile_serialization=False)
    _repack(folder / "b.pt", folder / "f.pt")
    for suffix in (".safetensors", ".bin"):
        _shards(folder / f"g{suffix}", tensors, suffix)

    def flat(path: Path, key: str | None) -> Tensors:
        return decoders.safetensors(path.read_bytes())

    def archive(path: Path, key: str | None) -> Tensors:
        return decoders.torch_archive(path.read_bytes(), key)

    def directory(path: Path, key: str | None) -> Tensors:
        return decoders.directory(path)

    def files(path: Path) -> tuple[str, ...]:
        return tuple(sorted(file.name for file in path.iterdir()))

    hf, bins = folder / "g.safetensors", folder / "g.bin"
    return [
        Original("safetensors", folder / "a.safetensors", ("",), flat),
        Original("torch", folder / "b.pt", ("",), archive),
        Original("torch, nested", folder / "c.ckpt", ("",), archive, key="state_dict"),
        Original("torch, no checksums", folder / "d.pth", ("",), archive),
        Original("torch, legacy", folder / "e.pt", ("",), archive, openable=False),
        Original("torch, repacked", folder / "f.pt", ("",), archive),
        Original("safetensors shards", hf, files(hf), directory),
        Original("torch shards", bins, files(bins), directory),
    ]


def _repack(source: Path, target: Path) -> None:
    """As other tools write archives: without torch's padding and data descriptors."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def _shards(folder: Path, tensors: dict[str, Tensor], suffix: str) -> None:
    folder.mkdir()
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    where = {name: f"{stem}-0000{k % 2 + 1}-of-00002{suffix}" for k, name in enumerate(tensors)}
    for file in set(where.values()):
        part = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        if suffix == ".safetensors":
            save_file(part, folder / file)
        else:
            torch.save(part, folder / file)
    index = {"metadata": {"total_size": 1234}, "weight_map": where}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index, indent=2))


def damage(original: Original, room: Path, rng: random.Random) -> tuple[Path, str]:
    """A damaged copy in `room`, and what was done to it."""
    if original.path.is_dir():
        copy = Path(shutil.copytree(original.path, room / original.path.name))
    else:
        copy = Path(shutil.copyfile(original.path, room / original.path.name))
    target = rng.choice(original.targets)
    file = copy / target if target else copy
    content = bytearray(file.read_bytes())
    chosen = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutation = rng.choice(_fitting(file.name, content))
        mutation(content, rng)
        chosen.append(mutation.__name__)
    file.write_bytes(content)
    return copy, f"{original.name}{'/' if target else ''}{target}: {', '.join(chosen)}"


def _fitting(name: str, content: bytearray) -> list[Mutation]:
    if name.endswith(".index.json"):
        return [*ANY, *[edit_json] * 6, swap_words]
    if name.endswith(".safetensors"):
        return [*ANY, *[edit_header] * 5, header_length, pad_header, swap_words]
    if content[:4] == b"PK\x03\x04":
        return [*ANY, *[edit_zip_field] * 4, *[edit_pickle] * 4, *[edit_pickle_bytes] * 2, swap_records, swap_words]
    return [*ANY, edit_bare_pickle]


# Any file ----------------------------------------------------------------------------------------------------


def truncate(content: bytearray, rng: random.Random) -> None:
    del content[rng.randrange(len(content) + 1) :]


def flip_bit(content: bytearray, rng: random.Random) -> None:
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def flip_early_bit(content: bytearray, rng: random.Random) -> None:
    if content:
        content[rng.randrange(min(len(content), 600))] ^= 1 << rng.randrange(8)


def set_bytes(content: bytearray, rng: random.Random) -> None:
    if content:
        start = rng.randrange(len(content))
        size = rng.choice((1, 2, 4, 8, 32))
        value = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
        content[start : start + size] = value[: len(content) - start]


def insert(content: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(content) + 1)
    content[start:start] = rng.randbytes(rng.choice((1, 2, 8, 64)))


def remove(content: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(content) + 1)
    del content[start : start + rng.choice((1, 2, 8, 64))]


def repeat(content: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(content) + 1)
    content[start:start] = content[start : start + rng.choice((8, 64, 512))]


def append(content: bytearray, rng: random.Random) -> None:
    content += rng.choice((b"\0", bytes(64), rng.randbytes(30), bytes(content[-100:])))


def swap_words(content: bytearray, rng: random.Random) -> None:
    """Replace a text of the format by another of its texts."""
    words = b"F32 I32 F64 F16 BF16 encoder half steps shape dtype Float Long Half storage data weight bias".split()
    words += b"version 00001 00002".split()
    present = [word for word in words if word in content]
    if present:
        old = rng.choice(present)
        at = [i for i in range(len(content)) if content.startswith(old, i)]
        start = rng.choice(at)
        content[start : start + len(old)] = rng.choice(words)


ANY: list[Mutation] = [truncate, flip_bit, flip_early_bit, set_bytes, insert, remove, repeat, append]


# JSON ----------------------------------------------------------------------------------------------------------


_ODD: tuple[Any, ...] = (0, 1, -1, 2**31, 2**63, 2**64, 1.5, None, True, "", "x", "../x", [], {}, [0], [2**62] * 3)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    found: list[tuple[Any, Any]] = []
    keys: Any = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        found += _places(value[key])
    return found


def _edit(value: Any, rng: random.Random) -> str:
    places = _places(value)
    if not places:
        return json.dumps(value)
    container, key = rng.choice(places)
    what = rng.randrange(6)
    if what == 0:
        del container[key]
    elif what == 1:
        container[key] = rng.choice(_ODD)
    elif what == 2 and isinstance(container[key], int):
        container[key] += rng.choice((-8, -4, -1, 1, 4, 8, 1000))
    elif what == 3:
        other, place = rng.choice(places)
        # Not into itself: that would be no JSON.
        if json.dumps(container) not in json.dumps(other[place]):
            container[key] = other[place]
    elif what == 4 and isinstance(container, dict):
        container[rng.choice(("x", "encoder.weight", str(key).upper(), ""))] = container.pop(key)
    text = json.dumps(value, separators=rng.choice(((",", ":"), (", ", ": "))))
    if what == 5 and isinstance(container, dict):  # a key twice
        pair = f"{json.dumps(key)}:{json.dumps(rng.choice((container[key], *_ODD)))},"
        text = "{" + pair + text[1:] if container is value else text
    return text


def edit_json(content: bytearray, rng: random.Random) -> None:
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        return
    content[:] = _edit(value, rng).encode()


def edit_header(content: bytearray, rng: random.Random) -> None:
    length = int.from_bytes(content[:8], "little")
    try:
        value = json.loads(content[8 : 8 + length].decode("utf-8"))
    except (ValueError, RecursionError):
        return
    text = _edit(value, rng).encode()
    text += b" " * (-len(text) % rng.choice((1, 8)))
    content[: 8 + length] = struct.pack("<Q", len(text)) + text


def header_length(content: bytearray, rng: random.Random) -> None:
    length = int.from_bytes(content[:8], "little")
    value = rng.choice((0, 1, length - 1, length + 1, length + 8, 2**31, 2**63, 2**64 - 1, rng.randrange(2**12)))
    content[:8] = struct.pack("<Q", value % 2**64)


def pad_header(content: bytearray, rng: random.Random) -> None:
    """Harmless: spaces after the JSON."""
    length = int.from_bytes(content[:8], "little")
    if 8 + length <= len(content):
        room = rng.choice((1, 7, 8, 64))
        content[8 + length : 8 + length] = b" " * room
        content[:8] = struct.pack("<Q", length + room)


# Zip and pickle ------------------------------------------------------------------------------------------------


_ENTRY = {4: 2, 6: 2, 8: 2, 10: 2, 16: 4, 20: 4, 24: 4, 28: 2, 30: 2, 32: 2, 38: 4, 42: 4}
_LOCAL = {4: 2, 6: 2, 8: 2, 14: 4, 18: 4, 22: 4, 26: 2, 28: 2}
_END = {4: 2, 6: 2, 8: 2, 10: 2, 12: 4, 16: 4, 20: 2}
_WIDE_END = {4: 8, 12: 2, 24: 8, 32: 8, 40: 8, 48: 8}
_FIELDS = ((b"PK\x01\x02", _ENTRY), (b"PK\x03\x04", _LOCAL), (b"PK\x05\x06", _END), (b"PK\x06\x06", _WIDE_END))


def edit_zip_field(content: bytearray, rng: random.Random) -> None:
    signature, fields = rng.choice(_FIELDS)
    at = [i for i in range(len(content)) if content.startswith(signature, i)]
    if not at:
        return
    place, size = rng.choice(list(fields.items()))
    start = rng.choice(at) + place
    old = int.from_bytes(content[start : start + size], "little")
    new = rng.choice((0, 1, old + 1, old - 1, old + 64, old ^ (1 << rng.randrange(8 * size)), 2 ** (8 * size) - 1, 8))
    content[start : start + size] = (new % 2 ** (8 * size)).to_bytes(size, "little")


def swap_records(content: bytearray, rng: random.Random) -> None:
    """Two entries of the directory trade their places."""
    at = [i for i in range(len(content)) if content.startswith(b"PK\x01\x02", i)]
    if len(at) > 1:
        one, two = rng.sample(at, 2)
        first = bytes(content[one + 42 : one + 46])
        content[one + 42 : one + 46] = content[two + 42 : two + 46]
        content[two + 42 : two + 46] = first


def _repacked(content: bytearray, change: Callable[[bytes], bytes]) -> None:
    """Change the table of tensors and write the archive again, with right checksums and places."""
    try:
        found = decoders.records(bytes(content))
        table = next(name for name in found if name.endswith("/data.pkl"))
    except (struct.error, AssertionError, StopIteration, ValueError, IndexError, OverflowError):
        return
    found[table] = change(found[table])
    body, directory = bytearray(), bytearray()
    for name, data in found.items():
        facts = struct.pack("<IIIHH", zlib.crc32(data), len(data), len(data), len(name.encode()), 0)
        place = len(body)
        body += b"PK\x03\x04" + struct.pack("<HHHI", 20, 0, 0, 0) + facts + name.encode() + data
        directory += b"PK\x01\x02" + struct.pack("<HHHHI", 20, 20, 0, 0, 0) + facts
        directory += struct.pack("<HHHII", 0, 0, 0, 0, place) + name.encode()
    end = struct.pack("<HHHHIIH", 0, 0, len(found), len(found), len(directory), len(body), 0)
    content[:] = body + directory + b"PK\x05\x06" + end


def edit_pickle_bytes(content: bytearray, rng: random.Random) -> None:
    def change(table: bytes) -> bytes:
        damaged = bytearray(table)
        rng.choice((flip_bit, flip_early_bit, remove, insert, repeat, truncate))(damaged, rng)
        return bytes(damaged)

    _repacked(content, change)


_NUMBERS = {"BININT1": (b"K", 1), "BININT2": (b"M", 2), "BININT": (b"J", 4)}


def _pickle_edit(table: bytes, rng: random.Random) -> bytes:
    """Replace, drop, double or exchange whole instructions."""
    try:
        steps = [(opcode, argument, place) for opcode, argument, place in pickletools.genops(table)]
    except Exception:  # already damaged
        return table
    ends = [place for _, _, place in steps[1:]] + [len(table)]
    parts = [table[place:end] for (_, _, place), end in zip(steps, ends, strict=True)]
    names = [opcode.name for opcode, _, _ in steps]
    k = rng.randrange(1, len(parts))
    numbers = [i for i, name in enumerate(names) if name in _NUMBERS]
    what = rng.randrange(6)
    if what <= 1 and numbers:  # sizes, strides, offsets
        i = rng.choice(numbers)
        value = int(str(steps[i][1])) + rng.choice((-1, 1, 2, 8, 100, -100, 2**20, 2**30))
        parts[i] = b"J" + struct.pack("<i", max(-(2**31), min(value, 2**31 - 1)))
    elif what == 2:
        del parts[k]
    elif what == 3:
        parts.insert(k, parts[k])
    elif what == 4:
        same = [i for i, name in enumerate(names) if name == names[k]]
        i = rng.choice(same)
        parts[k], parts[i] = parts[i], parts[k]
    else:
        calls = (
            b"cposix\nsystem\n",
            b"c__builtin__\nbytearray\n",
            b"R",
            b"b",
            b"\x81",
            b"Q",
            b"0",
            b"2",
            b"}",
            b"]",
            b"t",
        )
        parts.insert(k, rng.choice(calls))
    return b"".join(parts)


def edit_pickle(content: bytearray, rng: random.Random) -> None:
    _repacked(content, lambda table: _pickle_edit(table, rng))


def edit_bare_pickle(content: bytearray, rng: random.Random) -> None:
    content[:] = _pickle_edit(bytes(content), rng)
