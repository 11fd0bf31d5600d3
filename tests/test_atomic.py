"""Writes happen whole or not at all, and say what is wrong when they cannot."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stockpot import atomic
from stockpot.errors import WriteError


def full(*args: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


def by_bytes(path: Path) -> None:
    atomic.write_bytes(path, b"new")


def by_library(path: Path) -> None:
    with atomic.file(path) as place:
        place.write_bytes(b"new")


@pytest.mark.parametrize("write", [by_bytes, by_library])
@pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
def test_a_failing_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], moment: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(moment, full)
        with pytest.raises(WriteError) as caught:
            write(path)
    assert f"{path}: expected room and permission to write, found No space left on device" in str(
        caught.value
    )
    assert "Fix: free some space or choose another place; what was there before is unchanged" in str(
        caught.value
    )
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("file", b"old")]
    write(path)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("file", b"new")]


def test_what_a_library_leaves_beside_its_file_goes_away(tmp_path: Path) -> None:
    with atomic.file(tmp_path / "a.safetensors") as place:
        (place.parent / ".tmpAbC").write_text("half")
        save_file({"x": torch.zeros(3)}, place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_files_are_as_readable_as_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        by_bytes(tmp_path / "bytes")
        with atomic.file(tmp_path / "library") as place:
            save_file({"x": torch.zeros(3)}, place)  # makes it private by itself
        with atomic.directory(tmp_path / "folder") as folder:
            save_file({"x": torch.zeros(3)}, folder / "model.safetensors")
    finally:
        os.umask(before)
    for name in ("bytes", "library", "folder/model.safetensors"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def test_a_missing_permission_has_its_own_advice(tmp_path: Path) -> None:
    def denied() -> None:
        with atomic.writing(tmp_path / "file"):
            raise PermissionError(13, "Permission denied", str(tmp_path / ".file.writing"))

    with pytest.raises(WriteError, match=r"found Permission denied\.\n  Fix: make it writable or choose"):
        denied()


def test_errors_about_other_files_are_left_alone(tmp_path: Path) -> None:
    def reading(error: OSError) -> None:
        with atomic.writing(tmp_path / "out" / "file"):
            raise error

    for error in (
        FileNotFoundError(2, "No such file", str(tmp_path / "in")),
        BrokenPipeError(32, "Broken pipe"),
    ):
        with pytest.raises(type(error)) as caught:
            reading(error)
        assert caught.value is error


def test_the_errors_of_safetensors_are_told_apart(tmp_path: Path) -> None:
    class SafetensorError(Exception):
        pass

    def saving(text: str) -> None:
        with atomic.writing(tmp_path / "file"):
            raise SafetensorError(text)

    with pytest.raises(WriteError, match="found Error while serializing: I/O error: No space left"):
        saving("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(SafetensorError, match="dtype"):
        saving("unknown dtype")


def filled(path: Path, text: str) -> None:
    with atomic.directory(path, overwrite=True) as folder:
        (folder / "model").write_text(text)


@pytest.mark.skipif(sys.platform != "linux", reason="others cannot exchange two names")
def test_a_directory_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "soup", "old")
    exchange, seen = atomic._exchange, []

    def watched(first: Path, second: Path) -> bool:
        seen.append((second / "model").read_text())
        done = exchange(first, second)
        seen.append((second / "model").read_text())
        return done

    monkeypatch.setattr(atomic, "_exchange", watched)
    monkeypatch.setattr("os.rename", full)  # not needed
    filled(tmp_path / "soup", "new")
    assert seen == ["old", "new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["soup"]


def test_a_directory_is_replaced_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    for text in ("old", "new"):
        filled(tmp_path / "soup", text)
        assert (tmp_path / "soup" / "model").read_text() == text
        assert [entry.name for entry in tmp_path.iterdir()] == ["soup"]


def test_sweeping_removes_halves_and_puts_back_what_stepped_aside(tmp_path: Path) -> None:
    (tmp_path / ".a.json.writing").write_text("half")
    (tmp_path / ".b.writing").mkdir()
    (tmp_path / ".b.writing" / "x").write_text("half")
    (tmp_path / ".soup.replaced").mkdir()
    (tmp_path / ".soup.replaced" / "model").write_text("old")
    (tmp_path / ".done.replaced").mkdir()
    (tmp_path / "done").mkdir()
    (tmp_path / ".hidden").write_text("mine")
    (tmp_path / "c.writing").write_text("mine")
    atomic.sweep(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".hidden", "c.writing", "done", "soup"]
    assert (tmp_path / "soup" / "model").read_text() == "old"
    atomic.sweep(tmp_path / "nowhere")


def test_directories_are_made_with_what_they_lie_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tmp_path / "a" / "b" / "c"
    atomic.make_directory(wanted)
    assert wanted.is_dir()
    atomic.make_directory(wanted)
    # Another process may make it between the look and the making.
    real, looks = Path.is_dir, [True]
    monkeypatch.setattr(
        Path, "is_dir", lambda self: real(self) and not (self == wanted and looks and looks.pop())
    )
    atomic.make_directory(wanted)
    assert not looks


def test_a_directory_takes_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "soup").write_text("a file")
    with atomic.directory(tmp_path / "soup", overwrite=True) as folder:
        (folder / "model").write_text("new")
    assert [path.name for path in (tmp_path / "soup").iterdir()] == ["model"]
