"""Safetensors files and indexes of shards that lie."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

from attacks.kit import FLOATS, Threat, entry, header, shards, threat

TENSORS: list[Threat] = []
INDEXES: list[Threat] = []
PLACES: list[Threat] = []


def _file(folder: Path, content: object, data: bytes = FLOATS) -> Path:
    return header(folder / "m.safetensors", json.dumps(content).encode(), data)


for _name, _content, _words in (
    ("shape: 2 ** 60 numbers", {"w": entry(shape=(2**60,))}, "damaged or truncated"),
    ("shape: nothing times 2 ** 200", {"w": entry(0, 0, (0, 2**60, 2**60, 2**60, 2**20))}, "cannot have"),
    ("shape: a negative length", {"w": entry(shape=(-4,))}, "no type, shape and place"),
    ("shape: true instead of one", {"w": entry(shape=(True, 4))}, "no type, shape and place"),
    ("shape: a fraction", {"w": {**entry(), "shape": [4.0]}}, "no type, shape and place"),
    ("offset: negative", {"w": entry(-16, 0)}, "no type, shape and place"),
    ("offset: beyond 64 bits", {"w": entry(0, 2**64 + 16)}, "no type, shape and place"),
    ("offset: beyond the end", {"w": entry(0, 2**40, (2**38,))}, "where the header speaks of"),
    ("offset: backwards", {"w": entry(16, 0)}, "cannot have"),
    ("offset: two tensors on the same bytes", {"a": entry(), "b": entry()}, "starts at byte 0, not at 16"),
    ("offset: tensors that overlap", {"a": entry(0, 12, (3,)), "b": entry(8, 16, (2,))}, "starts at byte 8, not at 12"),
    ("offset: a hole", {"a": entry(0, 4, (1,)), "b": entry(8, 16, (2,))}, "starts at byte 8, not at 4"),
    ("entry: no table", {"w": [1, 2]}, "no type, shape and place"),
    ("entry: a list as header", [entry()], "no table of tensors"),
    ("type: unknown", {"w": entry(dtype="OBJECT")}, "damaged or truncated"),
    ("type: of less than a byte", {"w": entry(dtype="F4", shape=(32,))}, "found F4"),
    ("type: another size than the place", {"w": entry(dtype="F64")}, "damaged or truncated"),
    ("metadata: no texts", {"__metadata__": {"a": 1}, "w": entry()}, "damaged or truncated"),
    ("no tensors at all", {}, "where the header speaks of"),
):

    def _make(folder: Path, content: object = _content) -> Path:
        return _file(folder, content)

    TENSORS.append(Threat(_name, _make, _words))


@threat("header: a length beyond the file", "damaged or truncated", TENSORS)
def long_header(folder: Path) -> Path:
    return header(folder / "m.safetensors", json.dumps({"w": entry()}).encode(), length=2**63)


@threat("header: a length that cuts into the data", "damaged or truncated", TENSORS)
def greedy_header(folder: Path) -> Path:
    text = json.dumps({"w": entry()}).encode()
    return header(folder / "m.safetensors", text, length=len(text) + 8)


@threat("header: JSON nested a hundred thousand deep", "damaged or truncated", TENSORS)
def deep_header(folder: Path) -> Path:
    return header(folder / "m.safetensors", b'{"w":' * 100_000 + b"1" + b"}" * 100_000)


@threat("header: one name twice", "the key 'w' appears twice", TENSORS)
def name_twice(folder: Path) -> Path:
    first, second = json.dumps(entry(shape=(2, 2))), json.dumps(entry(shape=(4,)))
    return header(folder / "m.safetensors", f'{{"w": {first}, "w": {second}}}'.encode())


@threat("header: one key of an entry twice", "the key 'shape' appears twice", TENSORS)
def key_twice(folder: Path) -> Path:
    text = b'{"w": {"dtype": "F32", "shape": [4], "shape": [2, 2], "data_offsets": [0, 16]}}'
    return header(folder / "m.safetensors", text)


@threat("header: a name that is no UTF-8", "damaged or truncated", TENSORS)
def latin_name(folder: Path) -> Path:
    return header(folder / "m.safetensors", json.dumps({"wXX": entry()}).encode().replace(b"XX", b"\xff\xfe"))


@threat("header: half of a surrogate pair as a name", "damaged or truncated", TENSORS)
def surrogate(folder: Path) -> Path:
    return _file(folder, {"w\ud800": entry()})


@threat("header: a name of a million letters", None, TENSORS)
def long_name(folder: Path) -> Path:
    return _file(folder, {"w" * 10**6: entry()})


@threat("header: names that differ only in case", None, TENSORS)
def case_only(folder: Path) -> Path:
    """Harmless: they are two tensors, and stay two."""
    return _file(folder, {"w": entry(0, 8, (2,)), "W": entry(8, 16, (2,))})


@threat("header: a hundred megabytes and one byte", "damaged or truncated", TENSORS)
def huge_header(folder: Path) -> Path:
    path = folder / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001) + b"{")
        file.truncate(100_000_009)  # a file with a hole: takes no room
    return path


# Indexes --------------------------------------------------------------------------------------------------


@threat("index: an absolute path", "plain names of files in this directory", INDEXES)
def absolute(folder: Path) -> Path:
    outside = folder / "outside.safetensors"
    save_file({"a": torch.arange(4.0)}, outside)
    return shards(folder / "hf", {"a": str(outside), "b": "model-b.safetensors"})


@threat("index: a path upwards", "plain names of files in this directory", INDEXES)
def upwards(folder: Path) -> Path:
    save_file({"a": torch.arange(4.0)}, folder / "outside.safetensors")
    return shards(folder / "hf", {"a": "../outside.safetensors", "b": "model-b.safetensors"})


@threat("index: a shard that is a link out of the folder", "a link out of it", INDEXES)
def link_out(folder: Path) -> Path:
    save_file({"a": torch.arange(4.0)}, folder / "outside.safetensors")
    made = shards(folder / "hf", {"a": "model-a.safetensors", "b": "model-b.safetensors"})
    (made / "model-a.safetensors").unlink()
    (made / "model-a.safetensors").symlink_to(folder / "outside.safetensors")
    return made


@threat("index: a shard that is a link to itself", "a link out of it", INDEXES)
def link_circle(folder: Path) -> Path:
    made = shards(folder / "hf", {"a": "model-a.safetensors", "b": "model-b.safetensors"})
    (made / "model-a.safetensors").unlink()
    (made / "model-a.safetensors").symlink_to("model-a.safetensors")
    return made


@threat("index: a shard that is a FIFO", "not a regular file", INDEXES)
def shard_fifo(folder: Path) -> Path:
    made = shards(folder / "hf", {"a": "model-a.safetensors", "b": "model-b.safetensors"})
    (made / "model-a.safetensors").unlink()
    os.mkfifo(made / "model-a.safetensors")
    return made


@threat("index: a pickle among the shards", "plain names of files in this directory, ending in .safetensors", INDEXES)
def pickle_shard(folder: Path) -> Path:
    made = shards(folder / "hf", {"a": "model-a.pt", "b": "model-b.safetensors"})
    torch.save({"a": torch.arange(4.0)}, made / "model-a.pt")
    return made


@threat("index: a tensor listed twice", "the key 'a' appears twice", INDEXES)
def listed_twice(folder: Path) -> Path:
    names = b'"a": "model-a.safetensors", "a": "model-b.safetensors", "b": "model-b.safetensors"'
    return shards(folder / "hf", b'{"weight_map": {' + names + b"}}")


@threat("index: a tensor in a file that lacks it", "'a' is not in model-b.safetensors", INDEXES)
def listed_elsewhere(folder: Path) -> Path:
    return shards(folder / "hf", {"a": "model-b.safetensors", "b": "model-b.safetensors"})


@threat("index: a tensor that no file has", "'c' is not in model-a.safetensors", INDEXES)
def listed_nowhere(folder: Path) -> Path:
    return shards(folder / "hf", dict.fromkeys("ac", "model-a.safetensors") | {"b": "model-b.safetensors"})


@threat("index: a tensor left out", "'b' in model-b.safetensors is not listed", INDEXES)
def left_out(folder: Path) -> Path:
    made = shards(folder / "hf", {"a": "model-a.safetensors", "c": "model-b.safetensors"})
    save_file({"b": torch.arange(4.0), "c": torch.arange(4.0)}, made / "model-b.safetensors")
    return made


@threat("index: two weight maps", "the key 'weight_map' appears twice", INDEXES)
def two_maps(folder: Path) -> Path:
    return shards(folder / "hf", b'{"weight_map": {"a": "model-a.safetensors"}, "weight_map": {}}')


@threat("index: JSON nested a hundred thousand deep", "nested too deeply", INDEXES)
def deep_index(folder: Path) -> Path:
    return shards(folder / "hf", b'{"weight_map":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@threat("index: numbers as file names", "JSON without a weight_map", INDEXES)
def numbers(folder: Path) -> Path:
    return shards(folder / "hf", {"a": 1, "b": 2})


@threat("index: a name of a file with a NUL in it", "plain names of files in this directory", INDEXES)
def nul(folder: Path) -> Path:
    return shards(folder / "hf", {"a": "model-a\0.safetensors"})


@threat("index: sixty-five megabytes", "more than such a file has", INDEXES)
def huge_index(folder: Path) -> Path:
    made = shards(folder / "hf", {"a": "model-a.safetensors"})
    os.truncate(made / "model.safetensors.index.json", 65 * 2**20)
    return made


# Places that are no files -----------------------------------------------------------------------------------


@threat("place: a FIFO", "not a regular file", PLACES)
def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "m.safetensors")
    return folder / "m.safetensors"


@threat("place: a FIFO for a pickle", "not a regular file", PLACES)
def fifo_pickle(folder: Path) -> Path:
    os.mkfifo(folder / "m.pt")
    return folder / "m.pt"


@threat("place: an index that is a FIFO", "not a regular file", PLACES)
def fifo_index(folder: Path) -> Path:
    made = shards(folder / "hf", {"a": "model-a.safetensors"})
    (made / "model.safetensors.index.json").unlink()
    os.mkfifo(made / "model.safetensors.index.json")
    return made


@threat("place: a device without an end", "not a regular file", PLACES)
def endless(folder: Path) -> Path:
    (folder / "m.pt").symlink_to("/dev/zero")
    return folder / "m.pt"


@threat("place: an index without an end", "not a regular file", PLACES)
def endless_index(folder: Path) -> Path:
    made = shards(folder / "hf", {"a": "model-a.safetensors"})
    (made / "model.safetensors.index.json").unlink()
    (made / "model.safetensors.index.json").symlink_to("/dev/zero")
    return made


@threat("place: a link to itself", "expected a readable checkpoint file", PLACES)
def circle(folder: Path) -> Path:
    (folder / "m.pt").symlink_to("m.pt")
    return folder / "m.pt"


@threat("place: a directory under a file's name", "none of these files in it", PLACES)
def directory(folder: Path) -> Path:
    (folder / "m.safetensors").mkdir()
    return folder / "m.safetensors"


@threat("place: a name that is no UTF-8", "damaged or truncated", PLACES)
def odd_path(folder: Path) -> Path:
    path = Path(os.fsdecode(os.fsencode(folder) + b"/\xff\x1b[31m.safetensors"))
    path.write_bytes(b"\x08" + bytes(7) + b"{       ")
    return path
