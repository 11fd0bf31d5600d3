"""Writes happen whole or not at all, say what is wrong when they cannot, and never follow a link out."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stockpot import files, folders
from stockpot.errors import LinkError, RunError, SoupError, StockpotError, WriteError
from stockpot.files import Lock, parse_json, read_bytes, read_json, read_text, require_space

HEX = "0123456789abcdef"
Usage = namedtuple("Usage", "total used free")


def full(*args: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


def by_bytes(path: Path) -> None:
    files.write_bytes(path, b"new")


def by_library(path: Path) -> None:
    with files.file(path) as place:
        place.write_bytes(b"new")


def filled(path: Path, text: str, root: Path | None = None) -> None:
    with files.directory(path, overwrite=True, root=root) as folder:
        (folder / "model").write_text(text)


# ---- whole or not at all


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
    assert f"{path}: expected room and permission to write, found No space left on device" in str(caught.value)
    assert "Fix: free some space or choose another place; what was there before is unchanged" in str(caught.value)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("file", b"old")]
    write(path)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("file", b"new")]


def test_what_a_library_leaves_beside_its_file_goes_away(tmp_path: Path) -> None:
    with files.file(tmp_path / "a.safetensors") as place:
        (place.parent / ".tmpAbC").write_text("half")
        save_file({"x": torch.zeros(3)}, place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_what_killed_processes_left_of_a_large_file_goes_with_the_next_write(tmp_path: Path) -> None:
    for name in (f".a.{HEX}.writing", f".b.{HEX}.writing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    by_library(tmp_path / "a")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f".b.{HEX}.writing", "a"]
    filled(tmp_path / "b", "new")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b"]


def test_files_are_as_readable_as_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        by_bytes(tmp_path / "bytes")
        with files.file(tmp_path / "library") as place:
            save_file({"x": torch.zeros(3)}, place)  # makes it private by itself
        with files.directory(tmp_path / "folder") as folder:
            save_file({"x": torch.zeros(3)}, folder / "model.safetensors")
        files.open_for_append(tmp_path / "lines").close()
    finally:
        os.umask(before)
    for name in ("bytes", "library", "folder/model.safetensors", "lines"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def test_a_missing_permission_has_its_own_advice(tmp_path: Path) -> None:
    def denied() -> None:
        with files.writing(tmp_path / "file"):
            raise PermissionError(13, "Permission denied", str(tmp_path / ".file.writing"))

    with pytest.raises(WriteError, match=r"found Permission denied\.\n  Fix: make it writable or choose"):
        denied()


def test_a_missing_directory_is_said_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "none" / "file", Path("none/file")):
        with pytest.raises(WriteError, match=f"{path}: expected .*found No such file or directory"):
            by_bytes(path)
        with pytest.raises(FileNotFoundError, match=str(path.parent)):
            read_bytes(path)


def test_errors_about_other_files_are_left_alone(tmp_path: Path) -> None:
    def reading(error: OSError) -> None:
        with files.writing(tmp_path / "out" / "file"):
            raise error

    for error in (FileNotFoundError(2, "No such file", str(tmp_path / "in")), BrokenPipeError(32, "Broken pipe")):
        with pytest.raises(type(error)) as caught:
            reading(error)
        assert caught.value is error


def test_the_errors_of_safetensors_are_told_apart(tmp_path: Path) -> None:
    class SafetensorError(Exception):
        pass

    def saving(text: str) -> None:
        with files.writing(tmp_path / "file"):
            raise SafetensorError(text)

    with pytest.raises(WriteError, match="found Error while serializing: I/O error: No space left"):
        saving("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(SafetensorError, match="dtype"):
        saving("unknown dtype")


@pytest.mark.skipif(sys.platform != "linux", reason="others cannot exchange two names")
def test_a_directory_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "soup", "old")
    exchange, seen = folders._exchange, []

    def watched(folder: int | None, first: str, second: str) -> bool:
        seen.append((tmp_path / second / "model").read_text())
        done = exchange(folder, first, second)
        seen.append((tmp_path / second / "model").read_text())
        return done

    monkeypatch.setattr(folders, "_exchange", watched)
    monkeypatch.setattr("os.replace", full)  # not needed
    filled(tmp_path / "soup", "new")
    assert seen == ["old", "new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["soup"]


def test_a_directory_is_replaced_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda folder, first, second: False)
    for text in ("old", "new"):
        filled(tmp_path / "soup", text)
        assert (tmp_path / "soup" / "model").read_text() == text
        assert [entry.name for entry in tmp_path.iterdir()] == ["soup"]
    replace = os.replace

    def second_fails(source: str, target: str, **options: Any) -> None:
        if source.endswith(".writing"):
            full()
        replace(source, target, **options)

    monkeypatch.setattr("os.replace", second_fails)
    with pytest.raises(WriteError, match="No space left"):
        filled(tmp_path / "soup", "newer")
    assert (tmp_path / "soup" / "model").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["soup"]


def test_a_directory_that_exists_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "soup").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("soup", "link"):
        with pytest.raises(SoupError, match="expected a new directory, found something that already exists"):  # noqa: SIM117
            with files.directory(tmp_path / name):
                pass
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "soup"]


def test_sweeping_removes_halves_and_puts_back_what_stepped_aside(tmp_path: Path) -> None:
    (tmp_path / f".a.json.{HEX}.writing").write_text("half")
    (tmp_path / f".b.{HEX}.writing").mkdir()
    (tmp_path / f".b.{HEX}.writing" / "x").write_text("half")
    (tmp_path / f".soup.{HEX}.replaced").mkdir()
    (tmp_path / f".soup.{HEX}.replaced" / "model").write_text("old")
    (tmp_path / f".done.{HEX}.replaced").mkdir()
    (tmp_path / "done").mkdir()
    mine = [".hidden", "c.writing", ".c.writing", f"a.{HEX}.writing", ".a.0123.writing"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    files.sweep(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*mine, "done", "soup"])
    assert (tmp_path / "soup" / "model").read_text() == "old"
    files.sweep(tmp_path / "nowhere")
    files.sweep(tmp_path / ".hidden")


def test_directories_are_made_with_what_they_lie_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for root, top in ((None, "a"), (tmp_path / "r", "r")):
        wanted = tmp_path / top / "b" / "c"
        files.make_directory(wanted, root)
        assert wanted.is_dir()
        files.make_directory(wanted, root)
    # Another process may make it between the look and the making.
    wanted = tmp_path / "a" / "b" / "c"
    real, looks = Path.is_dir, [True]
    monkeypatch.setattr(Path, "is_dir", lambda self: real(self) and not (self == wanted and looks and looks.pop()))
    files.make_directory(wanted)
    assert not looks
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="File exists"):
        files.make_directory(tmp_path / "file", tmp_path)


def test_a_directory_takes_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "soup").write_text("a file")
    filled(tmp_path / "soup", "new")
    assert [path.name for path in (tmp_path / "soup").iterdir()] == ["model"]


def test_lines_are_appended_after_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for before, kept in ((b"", b""), (b"a\nto", b"a\n"), (b"a\n\0\0\0", b"a\n"), (b"torn", b"")):
        path.write_bytes(before)
        with files.open_for_append(path) as lines:
            lines.write("ä\n")
        assert path.read_bytes() == kept + "ä\n".encode()
    path.write_bytes(b"a\n" + b"x" * (3 * 2**20))
    files.open_for_append(path).close()
    assert path.read_bytes() == b"a\n"
    with path.open("wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(WriteError, match="at most 1,073,741,824 bytes, found 1,073,741,825 bytes"):
        files.open_for_append(path)


# ---- flushed in the right order


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed, renamed and removed, in order, by name."""
    found: list[str] = []
    real_sync, real_replace, real_remove = os.fsync, os.replace, os.rmdir

    def told(text: str) -> None:
        found.append(re.sub(r"\.[0-9a-f]{16}\.", ".*.", text))

    def fsync(handle: int) -> None:
        told(f"flush {Path(f'/proc/self/fd/{handle}').readlink().name}")
        real_sync(handle)

    def replace(source: str, target: str, **options: Any) -> None:
        told(f"rename {source} {target}")
        real_replace(source, target, **options)

    def rmdir(path: str, **options: Any) -> None:
        told(f"remove {path}")
        real_remove(path, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "rmdir", rmdir)
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads names of open files from /proc")
def test_a_directory_is_flushed_before_it_is_named_and_the_old_one_stays_until_then(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda folder, first, second: False)  # the way without one step
    home = tmp_path / "home"
    (home / "soup").mkdir(parents=True)
    (home / "soup" / "old").touch()
    filled(home / "soup", "w")
    assert told == [
        "flush model",
        "flush .soup.*.writing",
        "rename soup .soup.*.replaced",
        "rename .soup.*.writing soup",
        "flush home",
        "remove .soup.*.replaced",
    ]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux exchanges two names in one step")
def test_an_exchange_is_flushed_before_the_old_content_goes(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "soup").mkdir(parents=True)
    (home / "soup" / "old").touch()
    monkeypatch.chdir(home)  # a relative name is one in the current folder
    filled(Path("soup"), "w")
    assert told == ["flush model", "flush .soup.*.writing", "flush home", "remove .soup.*.writing"]
    assert [path.name for path in (home / "soup").iterdir()] == ["model"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads names of open files from /proc")
def test_a_file_is_flushed_before_its_name_and_the_name_after(tmp_path: Path, told: list[str]) -> None:
    by_bytes(tmp_path / "a")
    by_library(tmp_path / "b")
    assert told == [
        "flush .a.*.writing",
        "rename .a.*.writing a",
        f"flush {tmp_path.name}",
        "flush b",
        "rename .b.*.writing/b b",
        f"flush {tmp_path.name}",
        "remove .b.*.writing",
    ]


def test_where_directories_cannot_be_flushed_nothing_is_asked_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: no directory descriptors, no flags against links, files flushed through a writable handle."""
    real_open, real_sync = os.open, os.fsync
    opened: dict[int, tuple[str, int]] = {}

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        assert dir_fd is None
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        handle = real_open(path, flags, mode)
        opened[handle] = (str(path), flags)
        return handle

    def fsync(handle: int) -> None:
        assert opened[handle][1] & (os.O_RDWR | os.O_WRONLY)
        real_sync(handle)

    monkeypatch.setattr(folders, "DESCRIPTORS", False)
    monkeypatch.setattr(folders, "_NOFOLLOW", 0)
    monkeypatch.setattr(shutil, "_use_fd_functions", False)
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", fsync)
    root = tmp_path / "root"
    files.make_directory(root / "a", root)
    files.write_bytes(root / "a" / "file", b"1", root)
    assert files.read_bytes(root / "a" / "file", root=root) == b"1"
    for text in ("old", "new"):
        filled(root / "soup", text, root)
        assert (root / "soup" / "model").read_text() == text
    by_library(root / "library")
    files.sync_directory(root)
    (root / "link").symlink_to(tmp_path)
    for act in (lambda: files.write_bytes(root / "link" / "x", b"", root), lambda: read_bytes(root / "link")):
        with pytest.raises(LinkError, match="is a symbolic link"):
            act()
    files.clear(root, ["a", "link", "library", "none"])
    assert [path.name for path in root.iterdir()] == ["soup"]
    assert tmp_path.is_dir()


# ---- small files that may come from anyone


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


@pytest.mark.parametrize("follow", [False, True])
def test_what_is_no_file_is_not_read(tmp_path: Path, follow: bool) -> None:
    os.mkfifo(tmp_path / "fifo")
    for place in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_bytes(place, follow=follow)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none", follow=follow)


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
    with pytest.raises(ValueError, match=r"^text that is not UTF-8, from byte 2$"):
        parse_json(b'{"\xdd')


# ---- links are not followed


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What belongs to somebody else."""
    place = tmp_path / "outside"
    (place / "folder").mkdir(parents=True)
    (place / "folder" / "theirs").write_text("theirs")
    (place / "file").write_text("line\ntheirs")
    return place


def content(place: Path) -> list[tuple[str, bytes | None]]:
    return [(str(path), path.read_bytes() if path.is_file() else None) for path in sorted(place.rglob("*"))]


ACTS: dict[str, Callable[[Path, Path], object]] = {
    "write_bytes": lambda path, root: files.write_bytes(path, b"ours", root),
    "write_json": lambda path, root: files.write_json(path, {}, root),
    "make_directory": files.make_directory,
    "open_for_append": lambda path, root: files.open_for_append(path, root).close(),
    "read_bytes": lambda path, root: read_bytes(path, root=root),
    "read_text": lambda path, root: read_text(path, root=root),
    "read_json": lambda path, root: read_json(path, root=root),
    "file": lambda path, root: by_library_below(path, root),
    "directory": lambda path, root: filled(path, "ours", root),
    "sweep": files.sweep,
    "clear": lambda path, root: files.clear(path.parent, [path.name], root),
    "lock": lambda path, root: Lock(path.parent, path.name, root).acquire(),
    "check_inside": lambda path, root: files.check_inside(root, path),
}
REPLACES = ("write_bytes", "write_json", "file", "directory", "clear")  # the link itself


def by_library_below(path: Path, root: Path) -> None:
    with files.file(path, root) as place:
        place.write_bytes(b"new")


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("target", ["file", "folder", "nowhere"])
def test_nothing_goes_through_a_link_at_the_end(tmp_path: Path, outside: Path, act: str, target: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside / target)
    before = content(outside)
    if act in REPLACES:
        ACTS[act](root / "link", root)
        assert not (root / "link").is_symlink()
    else:
        with pytest.raises(LinkError, match=r"root/link is a symbolic link, which is never followed here"):
            ACTS[act](root / "link", root)
    assert content(outside) == before


@pytest.mark.parametrize("act", ACTS)
def test_nothing_goes_through_a_link_on_the_way(tmp_path: Path, outside: Path, act: str) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a" / "link").symlink_to(outside / "folder")
    before = content(outside)
    with pytest.raises(LinkError, match=r"root/a/link is a symbolic link") as caught:
        ACTS[act](root / "a" / "link" / "theirs", root)
    assert isinstance(caught.value, StockpotError)
    assert isinstance(caught.value, OSError)
    assert content(outside) == before
    assert [path.name for path in (root / "a").iterdir()] == ["link"]


@pytest.mark.parametrize("act", ACTS)
def test_nothing_leaves_the_root_by_its_name(tmp_path: Path, outside: Path, act: str) -> None:
    (tmp_path / "root").mkdir()
    before = content(outside)
    for path in (outside / "folder" / "theirs", tmp_path / "root" / ".." / "outside" / "file"):
        with pytest.raises(LinkError, match="is not inside"):
            ACTS[act](path, tmp_path / "root")
    assert content(outside) == before


@pytest.mark.parametrize("act", ["write_bytes", "make_directory", "open_for_append", "directory", "lock"])
def test_the_root_itself_may_be_a_link(tmp_path: Path, act: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    ACTS[act](tmp_path / "root" / "x", tmp_path / "root")
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["x"]


def test_what_the_user_named_is_read_through_links_when_asked(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    assert (read_bytes(tmp_path / "link", follow=True), read_text(tmp_path / "link", follow=True)) == (b"{}", "{}")
    assert read_json(tmp_path / "link", follow=True) == {}


def test_temporary_names_are_unpredictable_and_created_exclusively(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {folders.temporary_name("a") for _ in range(100)}
    assert len(names) == 100
    monkeypatch.setattr("secrets.token_hex", lambda count: HEX)  # somebody guesses it all the same
    (tmp_path / f".a.{HEX}.writing").symlink_to(outside / "file")
    before = content(outside)
    for path in (tmp_path / "a", tmp_path / "root" / "a"):
        if path.parent != tmp_path:
            path.parent.mkdir()
            (path.parent / f".a.{HEX}.writing").symlink_to(outside / "nowhere")
        with pytest.raises((LinkError, WriteError)):
            files.write_bytes(path, b"ours")
    assert content(outside) == before


def test_sweeping_and_clearing_remove_links_and_never_what_they_lead_to(tmp_path: Path, outside: Path) -> None:
    root = tmp_path / "root"
    (root / "methods" / "deep").mkdir(parents=True)
    for place in (root, root / "methods", root / "methods" / "deep"):
        (place / f".a.{HEX}.writing").symlink_to(outside / "file")
        (place / f".b.{HEX}.writing").symlink_to(outside / "folder")
        (place / f".c.{HEX}.replaced").symlink_to(outside / "folder")
    before = content(outside)
    files.sweep(root)
    assert [path.name for path in root.iterdir()] == ["methods"]
    files.clear(root, ["methods", "none"])
    assert list(root.iterdir()) == []
    assert content(outside) == before


def test_clearing_does_not_go_too_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(1100):
        Path("d").mkdir()
        os.chdir("d")
    os.chdir(tmp_path)
    with pytest.raises(WriteError, match=r"nested too deeply|Too many open files"):
        files.clear(tmp_path, ["d"])
    subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)


def test_what_is_changed_in_place_is_a_regular_file_of_its_own(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "theirs").write_text("theirs")
    os.link(tmp_path / "theirs", tmp_path / "hard")
    for act in ("lock", "open_for_append"):
        with pytest.raises(WriteError, match="expected a regular file of its own, found something else"):
            ACTS[act](tmp_path / "fifo", tmp_path)
        with pytest.raises(WriteError, match="found one with a second name elsewhere"):
            ACTS[act](tmp_path / "hard", tmp_path)
        with pytest.raises(WriteError, match="Is a directory"):
            ACTS[act](tmp_path, tmp_path.parent)
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_a_library_gets_plain_files_and_directories(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    for name in ("file", "none", "none/deeper"):
        assert files.check_inside(tmp_path, tmp_path / name) == tmp_path / name
    assert files.check_inside(tmp_path, tmp_path) == tmp_path
    with pytest.raises(LinkError, match="fifo is neither a regular file nor a directory"):
        files.check_inside(tmp_path, tmp_path / "fifo")


def test_a_link_that_a_library_makes_does_not_become_a_result(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    with pytest.raises(LinkError, match="which a library made"), files.file(tmp_path / "a") as place:
        place.symlink_to(tmp_path / "theirs")
    with pytest.raises(LinkError, match="which a library made"), files.directory(tmp_path / "b") as folder:
        (folder / "x").symlink_to(tmp_path / "theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


# ---- locks and space


@contextmanager
def held(folder: Path) -> Iterator[None]:
    lock = Lock(folder)
    lock.acquire()
    yield
    lock.release()


def test_a_lock_is_for_one_and_says_whose(tmp_path: Path) -> None:
    with held(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
        assert not Lock(tmp_path).try_acquire()
        with pytest.raises(RunError, match=rf"{tmp_path}: expected .* found one in use by process {os.getpid()}"):
            Lock(tmp_path).acquire()
        other = Lock(tmp_path, "other")
        assert other.try_acquire()
        other.release()
        other.release()
    again = Lock(tmp_path)
    assert again.try_acquire()
    again.release()


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files._lock
    removed: list[bool] = []

    def lock(handle: int) -> bool:
        if not removed:
            (tmp_path / ".lock").unlink()
            removed.append(True)
        return real(handle)

    monkeypatch.setattr(files, "_lock", lock)
    with held(tmp_path):
        assert not Lock(tmp_path).try_acquire()
    assert removed == [True]


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = f"""
import os, sys; from pathlib import Path; from stockpot.files import Lock
Lock(Path({str(tmp_path)!r})).acquire(); sys.stdout.write("held"); sys.stdout.flush(); sys.stdin.read(1)
os._exit(9)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == "held"
        with pytest.raises(RunError, match=f"in use by process {process.pid}"):
            Lock(tmp_path).acquire()
        process.communicate("x")
    assert Lock(tmp_path).try_acquire()


def test_too_little_room_is_said_in_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 40 * 10**6))
    require_space(tmp_path / "not" / "yet" / "there", 10**6, "a soup")
    expected = r"expected 2\.8 GiB of free space for a soup, found 38 MiB\.\n  Fix: free some space"
    with pytest.raises(WriteError, match=expected):
        require_space(tmp_path / "not" / "yet" / "there", 3 * 10**9, "a soup")
