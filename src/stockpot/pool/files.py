"""Looking at a file before handing it to a parser: is it one, and what does it seem to be."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from stockpot.errors import CheckpointError, describe

SAFETENSORS_SUFFIXES = (".safetensors",)
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = SAFETENSORS_SUFFIXES + TORCH_SUFFIXES

# What a file may look like.
SAFETENSORS = "a safetensors file"
ZIP = "a zip archive, as torch.save writes it"
PICKLE = "a pickle outside the zip format (torch.save before 1.6, or pickle.dump)"
UNKNOWN = "bytes of no known checkpoint format"

_SIGNATURES = (
    (b"PK\x03\x04", ZIP),
    (b"version https://git-lfs", "a Git LFS pointer, not the weights themselves"),
    (b"<!DOCTYPE", "a web page"),
    (b"<html", "a web page"),
    (b"\x89HDF", "an HDF5 file"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x80", PICKLE),
)


def shown(path: str | Path) -> str:
    """A path as printable text, also when its bytes are no valid UTF-8 or would break the line."""
    text = str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def listed(texts: Sequence[str], limit: int = 5) -> str:
    """The first few, each on one line and of bearable length, and how many more there are."""
    more = len(texts) - limit
    return ", ".join(shown(text)[:200] for text in texts[:limit]) + (f" and {more} more" if more > 0 else "")


def is_directory(path: Path) -> bool:
    """Unlike `Path.is_dir`, also answers for paths that cannot exist or be looked at."""
    return os.path.isdir(path)  # noqa: PTH112


def stays_inside(directory: Path, name: str) -> bool:
    """Whether a file of this directory is really in it, and no link to somewhere else.

    In the Hugging Face cache the files are links from snapshots/<revision>/ to blobs/, and only to there.
    """
    try:
        home = directory.resolve()
        target = (directory / name).resolve()
    except (OSError, RuntimeError):  # links in a circle
        return False
    cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    return target.parent == home or cached


def require_file(path: Path) -> int:
    """The size of `path`, which must be a regular file that can be read and is not empty.

    Parsers never see anything else: opening a FIFO would wait for ever, a device would never end.
    """
    expected = "a readable checkpoint file"
    try:
        status = path.stat()
    except FileNotFoundError:
        raise CheckpointError(
            describe(shown(path), expected=expected, found="nothing at this path", fix="check the path")
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            describe(
                shown(path), expected=expected, found=reason(error), fix="check the path and its permissions"
            )
        ) from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "something that is not a regular file"
        raise CheckpointError(
            describe(shown(path), expected=expected, found=kind, fix="give the path of a checkpoint file")
        )
    if status.st_size == 0:
        raise CheckpointError(
            describe(
                shown(path),
                expected=expected,
                found="an empty file (0 bytes)",
                fix="copy or download it again, or leave it out of the pool",
            )
        )
    return status.st_size


def looks_like(path: Path) -> str:
    """What the first bytes suggest, for messages about files that are not what their name says."""
    try:
        with path.open("rb") as file:
            head = file.read(32)
    except OSError as error:
        return reason(error)
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 100_000_000:
        return SAFETENSORS
    for magic, name in _SIGNATURES:
        if head.lower().startswith(magic.lower()):
            return name
    return UNKNOWN


def reason(error: BaseException) -> str:
    """The first line of an exception in plain words. It may quote the file, so it is made printable."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return shown(lines[0].strip().rstrip(".")) if lines else type(error).__name__
