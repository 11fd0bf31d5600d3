"""Directories opened so that nothing in them leads out of them.

Each directory is opened from the one above it and keeps its descriptor, so a name cannot be exchanged for a link
between a look and the use. Windows has no such descriptors: there every component is looked at first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from stockpot.errors import LinkError

DESCRIPTORS = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")  # everywhere but on Windows
DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(?P<kind>writing|replaced)", re.DOTALL)


class Folder:
    """An open directory. Names in it are looked up in it, and no link among them is followed."""

    def __init__(self, path: Path, handle: int | None) -> None:
        self.path = path
        self._handle = handle  # None: no descriptors here (Windows), so names are whole paths

    def _at(self, name: str) -> str:
        return name if self._handle is not None else str(self.path / name)

    def status(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(self._at(name), dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _is_directory(self, name: str) -> bool:
        status = self.status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def refuse_link(self, name: str) -> None:
        status = self.status(name)
        if status is not None and stat.S_ISLNK(status.st_mode):
            raise _is_link(self.path / name)

    def open(self, name: str, flags: int) -> int:
        if not _NOFOLLOW:
            self.refuse_link(name)
        try:
            return os.open(self._at(name), flags | _NOFOLLOW, 0o666, dir_fd=self._handle)
        except OSError:
            self.refuse_link(name)  # the system's words for it (ELOOP, ENOTDIR) would mislead
            raise

    def make(self, name: str) -> str:
        """A directory of this name, if there is none yet."""
        try:
            os.mkdir(self._at(name), dir_fd=self._handle)
        except FileExistsError:
            if not self._is_directory(name):
                self.refuse_link(name)
                raise
        return name

    def rename(self, name: str, target: str) -> None:
        os.replace(self._at(name), self._at(target), src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def sync(self) -> None:
        if self._handle is not None:  # Windows cannot flush a directory
            os.fsync(self._handle)

    def names(self) -> list[str]:
        return os.listdir(self.path if self._handle is None else self._handle)  # noqa: PTH208

    def remove(self, name: str) -> None:
        """A file, a link (not what it leads to), a directory with all that is in it, or nothing."""
        if not self._is_directory(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._at(name), dir_fd=self._handle)
        elif self._handle is None:
            shutil.rmtree(self.path / name)
        else:
            inner = Folder(self.path / name, self.open(name, DIRECTORY))
            with contextlib.closing(inner):
                for entry in inner.names():
                    inner.remove(entry)
            os.rmdir(name, dir_fd=self._handle)

    def sweep(self, only: str | None = None) -> None:
        """Remove what killed processes left half-written: of this name, or of all.

        Between the two renames of `replace_directory` they left the old content under another name: it is put back.
        """
        for entry in self.names():
            found = _TEMPORARY.fullmatch(entry)
            if found is None or only not in (None, found["name"]):
                continue
            if found["kind"] == "replaced" and self._is_directory(entry) and self.status(found["name"]) is None:
                self.rename(entry, found["name"])
            with contextlib.suppress(OSError):
                self.remove(entry)

    def replace_directory(self, new: str, name: str) -> None:
        """Give `name` to the directory `new`; what had it before goes away, or has the name `new` then.

        A directory cannot be renamed over a full one. Where the system can exchange two names, there is content under
        the name at any time; elsewhere the old one steps aside first, is put back if the second rename fails, and
        removed only after the new one stands.
        """
        aside = temporary_name(name, "replaced")
        if not self._is_directory(name):
            self.remove(name)
        elif _exchange(self._handle, new, name):
            return self.sync()  # the caller's temporary name has the old one now
        else:
            self.rename(name, aside)
        try:
            self.rename(new, name)
        except BaseException:
            if self._is_directory(aside):
                self.rename(aside, name)
            raise
        self.sync()
        self.remove(aside)
        return None

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)


@contextlib.contextmanager
def opened(path: Path, root: Path | None) -> Iterator[Folder]:
    """Open a directory: links may lead to `root` (by default to `path` itself), none from there."""
    parts = () if root is None else below(root, path)
    place = path if root is None else root
    if DESCRIPTORS:
        folder = Folder(place, os.open(place, DIRECTORY))
    else:
        check_inside(place, path)
        folder, parts = Folder(path, None), ()
    try:
        for part in parts:
            inner = Folder(folder.path / part, folder.open(part, DIRECTORY))
            folder.close()
            folder = inner
        yield folder
    except OSError as error:
        # Errors of calls with a descriptor know the name in the directory only.
        for side in ("filename", "filename2"):
            name = getattr(error, side)
            if isinstance(name, str) and not Path(name).is_absolute() and folder.path / name != Path(name):
                setattr(error, side, str(folder.path / name))
        raise
    except RecursionError:
        raise OSError(errno.ENAMETOOLONG, "Directories nested too deeply", str(path)) from None
    finally:
        folder.close()


def temporary_name(name: str, kind: str = "writing") -> str:
    return f".{name}.{secrets.token_hex(8)}.{kind}"


def _exchange(folder: int | None, first: str, second: str) -> bool:
    """Give each the other's name in one step, or answer that this cannot be done here."""
    try:
        rename = ctypes.CDLL(None).renameat2  # Linux
    except (OSError, AttributeError, TypeError):
        return False
    names = folder, os.fsencode(first), folder, os.fsencode(second)
    return folder is not None and bool(rename(*names, 2) == 0)  # 2: RENAME_EXCHANGE


def check_inside(root: Path, path: Path) -> Path:
    """`path`, for a library to open: no component below `root` is a link, and its end is a plain file or directory.

    What does not exist is not refused. Raises LinkError.
    """
    parts = below(root, path)
    place = root
    for part in parts:
        place = place / part
        try:
            mode = place.lstat().st_mode
        except OSError:
            return path  # the library that opens it says why it cannot
        if stat.S_ISLNK(mode):
            raise _is_link(place)
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise LinkError(f"{place} is neither a regular file nor a directory")
    return path


def check_entries(root: Path, folder: Path) -> Path:
    """`folder`, for a library that opens what it finds in it: no link on the way to it, and none in it."""
    for entry in check_inside(root, folder).iterdir():
        check_inside(folder, entry)
    return folder


def below(root: Path, path: Path) -> tuple[str, ...]:
    try:
        parts = path.absolute().relative_to(root.absolute()).parts
    except ValueError:
        parts = ("..",)
    if ".." in parts:
        raise LinkError(f"{path} is not inside {root}")
    return parts


def _is_link(path: Path) -> LinkError:
    return LinkError(f"{path} is a symbolic link, which is never followed here; put the real file or folder there")
