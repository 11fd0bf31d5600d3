"""One opened model: a lazy mapping of names to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from stockpot.errors import CheckpointError, describe
from stockpot.pool.files import (
    SAFETENSORS_SUFFIXES,
    SUFFIXES,
    TORCH_SUFFIXES,
    is_directory,
    require_file,
    shown,
)
from stockpot.pool.huggingface import open_directory
from stockpot.pool.naming import Rename, check_rename, new_names
from stockpot.pool.order import natural_key
from stockpot.pool.safetensors_format import open_safetensors
from stockpot.pool.source import Source
from stockpot.pool.spec import TensorSpec
from stockpot.pool.torch_format import open_torch


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One opened model. Nothing but headers has been read.

    `specs` is in natural order of the names, whatever the order in the file, so that a file and its
    conversion to another format are laid out alike. `key` says where in a nested file the weights were,
    `other_keys` where else there were some; `ignored` names entries that are no tensors; `aliases` are
    groups of names that are one tensor in the file."""

    path: Path
    format: str
    key: str | None
    specs: Mapping[str, TensorSpec]
    aliases: tuple[tuple[str, ...], ...]
    files: tuple[Path, ...]
    other_keys: tuple[str, ...]
    ignored: tuple[str, ...]
    _stored: Mapping[str, str] = field(repr=False)
    _source: Source = field(repr=False)

    def tensor(self, name: str) -> Tensor:
        """A view of the memory-mapped file. Writing to it is an error of the caller."""
        return self._source.read(self._stored[name])

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def open_checkpoint(path: str | Path, key: str | None = None, rename: Rename | None = None) -> Checkpoint:
    """Open a file, or a Hugging Face directory, and read its headers."""
    check_rename(rename)
    path = Path(path)
    source = _open_source(path, key)
    if not source.specs:
        raise CheckpointError(
            describe(
                shown(path), expected="a model", found="no tensors at all", fix="leave it out of the pool"
            )
        )
    stored = new_names(source.specs, rename, shown(path))
    order = sorted(stored, key=natural_key)
    renamed = {old: new for new, old in stored.items()}
    return Checkpoint(
        path=path,
        format=source.format,
        key=source.key,
        specs=MappingProxyType({name: source.specs[stored[name]] for name in order}),
        aliases=tuple(
            tuple(sorted((renamed[old] for old in group), key=natural_key)) for group in source.aliases
        ),
        files=source.files,
        other_keys=source.other_keys,
        ignored=source.ignored,
        _stored=stored,
        _source=source,
    )


def _open_source(path: Path, key: str | None) -> Source:
    suffix = path.suffix.lower()
    if is_directory(path):
        source = open_directory(path)
    elif suffix in TORCH_SUFFIXES:
        return open_torch(path, key)
    elif suffix in SAFETENSORS_SUFFIXES:
        source = open_safetensors(path)
    else:
        require_file(path)
        raise CheckpointError(
            describe(
                shown(path),
                expected=f"a file that ends in one of {', '.join(SUFFIXES)}, or a Hugging Face directory",
                found=f"the ending {suffix!r}" if suffix else "no ending",
                fix="rename the file to what it is, or convert it to safetensors",
            )
        )
    if key is not None:
        raise CheckpointError(
            describe(
                shown(path),
                expected=f"weights under the key {key!r}",
                found=f"a flat checkpoint ({source.format}), in which nothing is nested",
                fix="open it without a key",
            )
        )
    return source
