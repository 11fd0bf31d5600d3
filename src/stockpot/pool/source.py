"""What all format readers share: an opened checkpoint, and a look at a file before it is parsed."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from stockpot.errors import CheckpointError

SAFETENSORS_SUFFIXES = (".safetensors",)
TORCH_SUFFIXES = (".pt", ".pth", ".pth.tar", ".bin", ".ckpt")
SUFFIXES = SAFETENSORS_SUFFIXES + TORCH_SUFFIXES
COPY_AGAIN = "copy or download it again, or leave it out of the pool"

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
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_DIGITS = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape, as the file's header states them before any data is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


@lru_cache(4096)
def spec_of(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSpec:
    """One object for all tensors of a kind: files of 50,000 tensors are opened and compared in half the time."""
    return TensorSpec(dtype, shape)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One opened model: the tensors of a file, or of the shards of a directory. Nothing but headers has been read.

    `specs` is in natural order of the names, so that a file and its conversion to another format are laid out alike.
    `key` says where in a nested file the weights were; `ignored` names entries that are no tensors; `aliases` are
    groups of names that are one tensor in the file. `spare` are tensors of adapters' base that none of them changes: a
    model for another task may lack them, such as the head of the base.
    """

    path: Path
    format: str
    files: tuple[Path, ...]
    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Tensor] = field(repr=False)
    aliases: tuple[tuple[str, ...], ...] = ()
    key: str | None = None
    ignored: tuple[str, ...] = ()
    spare: frozenset[str] = frozenset()

    def tensor(self, name: str) -> Tensor:
        """A view of the memory-mapped file. Writing to it is an error of the caller."""
        return self.read(name)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def mixing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are kept in fp32, or fp64 when the ingredients are fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def suffix_of(path: Path) -> str:
    """The ending that says what a file is, in small letters: `.pth.tar` is one."""
    name = path.name.lower()
    return ".pth.tar" if name.endswith(".pth.tar") else path.suffix.lower()


def natural_key(text: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """The order people expect, `model_2` before `model_10`; the text itself breaks ties ("01", "1").

    Numbers compare by length and then as text, because `int` refuses the thousands of digits that a hostile
    file may put in a name.
    """
    return tuple(_part(part) for part in _DIGITS.split(text) if part), text


@lru_cache(2)
def natural_order(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names sorted; once for all the files of a pool, which mostly have the same."""
    return tuple(sorted(names, key=natural_key))


def _part(part: str) -> tuple[int, int, str]:
    if part[0] in "0123456789":
        digits = part.lstrip("0")
        return 0, len(digits), digits
    return 1, 0, part


def shown(path: str | Path) -> str:
    """A path as printable text, also when its bytes are no valid UTF-8 or would break the line."""
    text = str(path)
    with contextlib.suppress(UnicodeEncodeError):  # halves of pairs, of which JSON may speak, are escaped below
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def listed(texts: Sequence[str], limit: int = 5) -> str:
    """The first few, each on one line and of bearable length, and how many more there are."""
    more = len(texts) - limit
    return ", ".join(shown(text)[:200] for text in texts[:limit]) + (f" and {more} more" if more > 0 else "")


def reason(error: BaseException) -> str:
    """The first line of an exception in plain words. It may quote the file, so it is made printable."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    said = re.sub(r"unexpected(ly)? ", "", lines[0], flags=re.IGNORECASE) if lines else type(error).__name__
    return shown(said.strip().rstrip("."))


def refusal(subject: str | Path, expected: str, found: str, fix: str) -> CheckpointError:
    return CheckpointError.of(shown(subject), expected=expected, found=found, fix=fix)


def is_directory(path: Path) -> bool:
    """Unlike `Path.is_dir`, this also answers for paths that cannot exist or be looked at."""
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
    try:
        status = path.stat()
    except FileNotFoundError:
        found, fix = "nothing at this path", _where_instead(path)
    except (OSError, ValueError) as error:
        found, fix = reason(error), "check the path and its permissions"
    else:
        if not stat.S_ISREG(status.st_mode):
            found = "a directory" if stat.S_ISDIR(status.st_mode) else "something that is not a regular file"
            fix = "give the path of a checkpoint file"
        elif not status.st_size:
            found, fix = "an empty file (0 bytes)", COPY_AGAIN
        else:
            return status.st_size
    raise refusal(path, "a readable checkpoint file", found, fix)


def _where_instead(path: Path) -> str:
    """What somebody meant who gave a path where nothing is."""
    try:
        beside = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        beside = []
    if close := difflib.get_close_matches(path.name, beside, n=1):
        return f"did you mean {shown(path.with_name(close[0]))}"
    if not beside and HUB_NAME.fullmatch(str(path)):
        return f"check the path; a model of the Hub is hf://{path}"
    return "check the path"


def looks_like(path: Path) -> str:
    """What the first bytes suggest, for messages about files that are not what their name says."""
    try:
        with path.open("rb") as file:
            head = file.read(32)
    except OSError as error:
        return reason(error)
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 100_000_000:
        return SAFETENSORS
    return next((name for magic, name in _SIGNATURES if head.lower().startswith(magic.lower())), UNKNOWN)
