"""Small files are read whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stockpot.small_files import parse_json, read_bytes, read_json, read_text


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bytes(path) == b"12345"
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(ValueError, match="5 bytes, more than such a file has"):
        read_bytes(path, 4)


def test_the_usual_limit_is_64_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    for read in (read_bytes, read_text, read_json):
        with pytest.raises(ValueError, match="67,108,865 bytes"):
            read(path)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for place in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_bytes(place)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


def test_text_is_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("ä".encode())
    assert read_text(tmp_path / "a") == "ä"
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_text(tmp_path / "a")


def test_json_is_plain_and_says_each_key_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"a": [1, {"b": null}], "c": {"b": 2}}')
    assert read_json(tmp_path / "a") == {"a": [1, {"b": None}], "c": {"b": 2}}
    assert parse_json("[1]") == [1]
    for text in ('{"a": 1, "a": 1}', '{"x": {"a": 1, "b": 2, "a": 3}}'):
        with pytest.raises(ValueError, match="the key 'a' appears twice"):
            parse_json(text.encode())
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
