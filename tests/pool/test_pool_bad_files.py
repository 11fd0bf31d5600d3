"""Damaged and hostile files: always our error, never code from the file, never wrong values."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool_files import bits, state, write, write_index, write_shards

from stockpot.errors import CheckpointError
from stockpot.pool import open_checkpoint
from stockpot.pool.checkpoint import HeaderError, read_header


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_truncation_anywhere_is_noticed(tmp_path: Path, suffix: str) -> None:
    whole = write(tmp_path / f"whole{suffix}", state()).read_bytes()
    cut = tmp_path / f"cut{suffix}"
    steps = sorted({1, 7, 8, 9, 30, 63, 64, *range(100, len(whole), 97), len(whole) - 4, len(whole) - 1})
    for size in steps:
        cut.write_bytes(whole[:size])
        text = refusal(cut)
        assert str(cut) in text, size
        assert "damaged or truncated" in text or "no known checkpoint format" in text, size
        assert "Fix: copy or download it again, or leave it out of the pool." in text, size


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".bin", ".ckpt"])
def test_empty_files_are_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    path.touch()
    assert f"{path}: expected a readable checkpoint file, found an empty file (0 bytes)." in refusal(path)


def test_absent_files_directories_and_fifos(tmp_path: Path) -> None:
    assert "found nothing at this path" in refusal(tmp_path / "no.pt")
    assert "found none of these files in it" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.pt")
    assert "something that is not a regular file" in refusal(tmp_path / "pipe.pt"), "and did not wait for a writer"


class Bomb:
    """Unpickled without care, it creates the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("variable", [None, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_code_in_a_pickle_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    marker = tmp_path / "marker"
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(1), "payload": Bomb(marker)}, path)
    text = refusal(path)
    assert not marker.exists()
    assert "the file asks for posix.system" in text
    assert "opening it would run code from the file, so it was refused and nothing was run" in text
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        payload = archive.read("m/data.pkl")
    assert b"system" in payload, "the bomb was in the file"


def test_a_bomb_outside_the_zip_format_is_not_run_either(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / "m.pt"
    path.write_bytes(pickle.dumps(Bomb(marker)))
    text = refusal(path)
    assert not marker.exists()
    assert "a pickle outside the zip format" in text
    pickle.loads(path.read_bytes())
    assert marker.exists(), "the bomb works where it is opened without care"


def test_the_refused_class_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"model": torch.nn.Linear(2, 2)}, path)
    text = refusal(path)
    assert "the file asks for torch.nn.modules.linear.Linear" in text
    assert "save only its state_dict" in text


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (pickle.dumps({"w": 1}, protocol=4), "(it uses the instruction FRAME, which torch.save does not write)"),
        (b"\x80\x02Q.", "takes from an empty stack)"),
        (b"\x80", "cannot read as weights"),
        (b"\x80\x02cposix\nsystem\n(Vtouch marker\ntR.", "asks for posix.system"),
        (b"\x80\x02}U\x01wc__builtin__\neval\n(V1\ntRs.", "eval, which is not plain tensor data"),
    ],
)
def test_odd_pickles_never_lead_to_advice_to_load_them_unsafely(tmp_path: Path, payload: bytes, words: str) -> None:
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (("data.pkl", payload), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"m/{name}", content)
    text = refusal(path)
    assert words in text
    assert "weights_only" not in text
    assert "safe_globals" not in text


def test_torchscript_is_a_program(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("data.pkl", "version", "constants.pkl"):
            archive.writestr(f"m/{name}", b"3\n")
    assert "found a TorchScript program; opening it would run code" in refusal(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_real_torchscript_file_is_not_called_damaged(tmp_path: Path) -> None:
    """Its code is in compressed records."""
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "m.pt")
    text = refusal(tmp_path / "m.pt")
    assert "found a TorchScript program" in text
    assert "damaged" not in text
    assert "save only its state_dict" in text


@pytest.mark.parametrize("extra", [argparse.Namespace(lr=0.1), np.float64(0.9), Path("x")], ids=["a", "n", "p"])
def test_harmless_extras_are_refused_with_the_way_to_save_again(tmp_path: Path, extra: Any) -> None:
    torch.save({"state_dict": state(), "extra": extra}, tmp_path / "m.pt")
    text = refusal(tmp_path / "m.pt")
    assert "which is not plain tensor data" in text
    assert "save only its state_dict" in text


def test_a_codec_that_takes_for_ever_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    long = "".join(chr(0x4E00 + k % 20000) for k in range(200_000)).encode()
    call = b"c_codecs\nencode\n" + b"X" + struct.pack("<I", len(long)) + long + b"X\x08\x00\x00\x00punycode\x86R"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (("data.pkl", b"\x80\x02" + call + b"."), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"m/{name}", content)
    start = time.monotonic()
    assert "encodes bytes in another way than pickles are written" in refusal(path)
    assert time.monotonic() - start < 5


def test_legacy_files_get_the_way_to_save_them_again(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(state(), path, _use_new_zipfile_serialization=False)
    text = refusal(path)
    assert "the zip format that torch.save has written since 1.6, found a pickle outside the zip format" in text
    assert "safetensors.torch.save_file(state_dict, 'model.safetensors') or torch.save(state_dict, path)" in text


@pytest.mark.parametrize(
    ("content", "suffix", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", ".safetensors", "found a Git LFS pointer"),
        (b"<!doctype html><html>", ".bin", "found a web page"),
        (b"\x89HDF\r\n", ".ckpt", "found an HDF5 file"),
        (b"\x00" * 50, ".pt", "found bytes of no known checkpoint format"),
    ],
)
def test_other_things_under_a_checkpoints_name(tmp_path: Path, content: bytes, suffix: str, words: str) -> None:
    path = tmp_path / f"m{suffix}"
    path.write_bytes(content)
    assert words in refusal(path)


def test_swapped_endings_are_recognised(tmp_path: Path) -> None:
    tensors = write(tmp_path / "a.safetensors", state())
    assert "found a safetensors file.\n  Fix: rename it so that it ends in .safetensors." in refusal(
        tensors.rename(tmp_path / "a.pt")
    )
    pickled = write(tmp_path / "b.pt", state())
    assert "found a zip archive, as torch.save writes it." in refusal(pickled.rename(tmp_path / "b.safetensors"))


def repacked(path: Path, compression: int) -> None:
    with zipfile.ZipFile(path) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records:
            archive.writestr(name, content)


def test_compressed_archives_are_refused_since_mapping_would_read_the_compressed_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt", {"w": torch.zeros(10_000)})
    repacked(path, zipfile.ZIP_DEFLATED)
    assert "is compressed" in refusal(path)
    repacked(path, zipfile.ZIP_STORED)
    assert open_checkpoint(path).tensor("w").sum() == 0, "a plain repacked archive is fine"
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("m/data/0").header_offset
    damaged = bytearray(path.read_bytes())
    damaged[start + 28] += 1  # the length of the local header's extra field, zero in such archives
    path.write_bytes(damaged)
    assert "record 'm/data/0' does not fill its place in the file" in refusal(path), "but not when it is damaged"


def test_an_archive_whose_records_shift_is_refused(tmp_path: Path) -> None:
    """One flipped bit in a length field would move where a tensor is read from."""
    path = write(tmp_path / "m.pt", {f"w{k}": torch.arange(20.0 + k) for k in range(8)})
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        starts = {record.filename: record.header_offset for record in archive.infolist() if "/data/" in record.filename}
    name, start = next((name, start) for name, start in starts.items() if 32 < content[start + 28] < 192)
    for shift in (1, -1, 2, -2, 4, -4, 8, -8, 16, -16):
        damaged = bytearray(content)
        damaged[start + 28] += shift  # the length of the local header's extra field
        path.write_bytes(damaged)
        assert f"record '{name}' does not fill its place in the file" in refusal(path), shift


@pytest.mark.parametrize("checksums", [True, False])
def test_a_flipped_bit_in_the_table_of_tensors_is_noticed(tmp_path: Path, checksums: bool) -> None:
    """It could turn one tensor's name or storage into another's, and still load."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        path = write(tmp_path / "m.pt", {"aa": torch.zeros(1), "ab": torch.ones(1)})
    finally:
        torch.serialization.set_crc32_options(before)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"ab", b"ac", 1))
    if checksums:
        assert "record 'm/data.pkl' does not have its checksum" in refusal(path)
    else:
        assert set(open_checkpoint(path).specs) == {"aa", "ac"}, "files without checksums still open"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_records_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt", state())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("M/DATA.PKL", b"x")
    assert "two records have the same name" in refusal(path)


@pytest.mark.parametrize("length", [0, 2**20, 2**40, 2**64 - 1])
def test_lying_header_lengths(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "m.safetensors", state())
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert "a damaged or truncated one" in refusal(path)


def test_every_single_flipped_bit_of_a_header_is_noticed_or_harmless(tmp_path: Path) -> None:
    saved = {"w": torch.arange(4, dtype=torch.int32), "v": torch.arange(2, dtype=torch.int32)}
    path = write(tmp_path / "m.safetensors", saved)
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for position in range(end * 8):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError:
            refused += 1
        else:
            for name, spec in checkpoint.specs.items():
                assert len(bits(checkpoint.tensor(name))) == spec.nbytes
    assert refused > end * 4


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize(
    "name", ["../m", "/tmp/m", "sub/m", "..\\m", "C:m", "m\0", ".", "..", ""], ids=lambda name: repr(name)
)
def test_an_index_may_only_name_files_beside_it(tmp_path: Path, name: str, suffix: str) -> None:
    folder = tmp_path / "hf"
    write_shards(folder, {"w": torch.ones(1)}, suffix)
    write_index(folder, {"w": name + suffix if name not in (".", "..", "") else name}, suffix)
    assert f"expected plain names of files in this directory, ending in {suffix}, found" in refusal(folder)


def test_an_index_cannot_reach_out_by_a_link(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside.safetensors", {"w": torch.ones(1)})
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "model-1.safetensors").symlink_to(outside)
    write_index(folder, {"w": "model-1.safetensors"})
    assert "found 'model-1.safetensors', a link out of it" in refusal(folder)


def test_the_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    blob = write(tmp_path / "models--a--b" / "blobs" / "x.safetensors", {"w": torch.ones(1)})
    blob = blob.rename(blob.with_suffix(""))
    folder = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    (folder / "model-1.safetensors").symlink_to(Path("../../blobs") / blob.name)
    write_index(folder, {"w": "model-1.safetensors"})
    assert list(open_checkpoint(folder).specs) == ["w"]


def test_an_index_that_lies(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "hf", {"a": torch.ones(1), "b": torch.ones(2)})
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_index(folder, {"a": second, "b": second})
    assert f"found 'a' is not in {second}" in refusal(folder)
    write_index(folder, {"b": second, "c": first})
    text = refusal(folder)
    assert f"'c' is not in {first}, 'a' in {first} is not listed" in text
    assert "index and shards are from different models" in text


def test_all_missing_shards_are_listed(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "hf", state())
    for path in sorted(folder.glob("*.safetensors"))[:2]:
        path.unlink()
    text = refusal(folder)
    assert text.count("found nothing at this path") == 2
    assert "model-00001-of-00003.safetensors" in text
    assert "model-00002-of-00003.safetensors" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "no valid JSON"),
        (b"\xff\xfe\x00", "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
        (b"[]", "JSON without a weight_map"),
        (b'{"weight_map": {}}', "JSON without a weight_map"),
        (b'{"weight_map": {"a": 5}}', "JSON without a weight_map"),
        (b'{"weight_map": {"a": "model-a.safetensors", "b": 5}}', "JSON without a weight_map"),
        (b"", "an empty file"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    assert words in refusal(tmp_path)


def test_paths_that_are_no_text_still_give_a_printable_message(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff\n.safetensors"))
    path.write_bytes(b"12345")
    text = refusal(path)
    assert "m\\xff\\n.safetensors: expected" in text
    text.encode("utf-8")


# A safetensors header must be able to be true, to the byte.


def written(folder: Path, header: Any, data: int = 16, spaces: int = 0) -> tuple[Path, int]:
    text = (json.dumps(header) if not isinstance(header, str) else header).encode() + b" " * spaces
    path = folder / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path, 8 + len(text) + data


def entry(start: int, stop: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"w": entry(0, 16, 4)}, 16),
        ({"b": entry(8, 16, 2), "a": entry(0, 8, 2)}, 16),
        ({"__metadata__": {"format": "pt"}, "w": entry(0, 16, 4)}, 16),
        ({"empty": entry(0, 0, 0, 3), "w": entry(0, 16, 4), "last": entry(16, 16, 0)}, 16),
        ({"scalar": entry(0, 4)}, 4),
        ({}, 0),
        ({"w": entry(0, 0, 0, 2**62)}, 0),
    ],
)
def test_headers_that_can_be_true(tmp_path: Path, header: Any, data: int) -> None:
    for spaces in (0, 5):
        read_header(*written(tmp_path, header, data, spaces))


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"w": entry(0, 16, 4)}, 17, "bytes where the header speaks of"),
        ({"w": entry(0, 16, 4)}, 15, "bytes where the header speaks of"),
        ({"a": entry(1, 16, 4)}, 16, "starts at byte 1, not at 0"),
        ({"a": entry(0, 8, 2), "b": entry(7, 16, 2)}, 16, "starts at byte 7, not at 8"),
        ({"w": entry(9, 8, 2)}, 16, "cannot have"),
        ({"w": entry(0, 0, 0, 2**62, 2)}, 0, "cannot have"),
        ({"w": entry(0, 2**62 + 1, 2)}, 0, "no type, shape and place"),
        ({"w": entry(0, 0, 2**62 + 1)}, 0, "no type, shape and place"),
        ({"w": {**entry(0, 16, 4), "data_offsets": [0]}}, 16, "no type, shape and place"),
        ({"w": {**entry(0, 16, 4), "data_offsets": [0, 8, 16]}}, 16, "no type, shape and place"),
        ({"w": {**entry(0, 16, 4), "data_offsets": None}}, 16, "no type, shape and place"),
        ({"w": {**entry(0, 16, 4), "dtype": 1}}, 16, "no type, shape and place"),
        ({"w": {**entry(0, 16, 4), "shape": "4"}}, 16, "no type, shape and place"),
        ({"w": None}, 16, "no type, shape and place"),
        ({"w": entry(0, 16, 4), "__metadata": {}}, 16, "no type, shape and place"),
        ([], 16, "no table of tensors"),
        ("{", 16, "no valid JSON"),
    ],
)
def test_headers_that_cannot(tmp_path: Path, header: Any, data: int, words: str) -> None:
    with pytest.raises(HeaderError, match=words):
        read_header(*written(tmp_path, header, data))


def test_a_header_may_fill_the_file_and_no_more(tmp_path: Path) -> None:
    path, size = written(tmp_path, {}, 0)
    read_header(path, size)
    for length in (size - 7, 2**63, 100_000_001):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(HeaderError, match=f"a header of {length:,} bytes in a file of {size}"):
            read_header(path, size)
