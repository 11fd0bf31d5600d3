"""Folders of torch.distributed.checkpoint, as FSDP trainings leave them: tensors in pieces, one file for each rank.

What is where says `.metadata`, a pickle that the library runs when it reads it. Here nothing of it is run
(`pickled_values`), what it says is checked against the files, and the pieces are read like any file of torch.save.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stockpot.pool import source
from stockpot.pool.nesting import find_weights
from stockpot.pool.pickles import Made, Named, Pairs, PickleError, pickled_values
from stockpot.pool.source import COPY_AGAIN, Checkpoint, reason, refusal, shown, spec_of
from stockpot.pool.torch_files import read_piece

TABLE, ENDING = ".metadata", ".distcp"
_LARGEST = 2**29  # bytes of the table
_MODULE = "torch.distributed.checkpoint."
_TENSOR = f"{_MODULE}metadata.TensorStorageMetadata"
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class _Piece:
    """A box of a tensor, and where its bytes are."""

    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    length: int


def open_distributed(directory: Path, key: str | None = None) -> Checkpoint:
    table = directory / TABLE
    if source.require_file(table) > _LARGEST:
        raise refusal(table, f"a table of at most {_LARGEST:,} bytes", "a larger one", COPY_AGAIN)
    try:
        metas, places, pieces = _read(directory, table.read_bytes())
    except (PickleError, OSError) as error:
        fix = f"{COPY_AGAIN}; or convert it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        expected = "the table of a torch.distributed.checkpoint"
        raise refusal(table, expected, reason(error), f"{fix} {shown(directory)} model.pt") from error
    weights, place = find_weights(_nested(metas, places), key, directory)
    stored = {id(meta): name for name, meta in metas.items()}
    names = {name: stored[id(meta)] for name, meta in weights.items() if id(meta) in stored}
    specs = {name: spec_of(metas[flat].dtype, tuple(metas[flat].shape)) for name, flat in names.items()}

    def read(name: str) -> Tensor:
        spec = specs[name]
        whole = torch.zeros(spec.shape, dtype=spec.dtype)
        for piece in pieces[names[name]]:
            box = tuple(slice(start, start + size) for start, size in zip(piece.begin, piece.sizes, strict=True))
            part = read_piece(piece.file, piece.offset, piece.length, name)
            if part.dtype != spec.dtype or tuple(part.shape) != piece.sizes:
                found = f"a piece of {source.dtype_name(part.dtype)} {list(part.shape)}"
                expected = f"pieces as the table says, {source.dtype_name(spec.dtype)} {list(piece.sizes)}"
                raise refusal(f"{shown(piece.file)}, tensor {shown(name)[:200]!r}", expected, found, COPY_AGAIN)
            if piece.sizes == spec.shape:
                return part
            whole[box] = part
        return whole

    files = sorted({piece.file for flat in names.values() for piece in pieces[flat]})
    ignored = tuple(name for name in weights if name not in names)
    return Checkpoint(directory, "torch-distributed", (table, *files), specs, read, key=place, ignored=ignored)


def _read(
    directory: Path, content: bytes
) -> tuple[dict[str, Tensor], dict[str, tuple[object, ...]], dict[str, list[_Piece]]]:
    """Every tensor without its data, where it was in the state that was saved, and its pieces."""
    about = pickled_values(content)
    if not isinstance(about, Made) or about.name != f"{_MODULE}metadata.Metadata":
        raise PickleError("it describes something else")
    described, stored = about.fields.get("state_dict_metadata"), about.fields.get("storage_data")
    if not isinstance(described, Pairs) or not isinstance(stored, Pairs):
        raise PickleError("it does not say which tensors there are, and where")
    where: dict[tuple[str, tuple[int, ...]], Made] = {}
    for index, info in stored:
        if isinstance(index, Made) and isinstance(info, Made) and index.fields.get("offset") is not None:
            where[_text(index.fields.get("fqn")), _shape(index.fields["offset"])] = info
    planned = about.fields.get("planner_data")
    planned = planned if isinstance(planned, Pairs) else Pairs()
    places = {_text(name): place for name, place in planned if isinstance(place, tuple)}
    sizes = {file.name: file.stat().st_size for file in directory.iterdir() if file.name.endswith(ENDING)}
    metas, pieces = {}, {}
    for name, one in described:
        if not isinstance(one, Made) or one.name != _TENSOR:
            continue  # settings and counters
        dtype, shape = _dtype(one.fields.get("properties")), _shape(one.fields.get("size"))
        pieces[_text(name)] = _pieces(directory, name, one, where, sizes, dtype.itemsize)
        _check_cover(name, shape, pieces[name])
        metas[name] = torch.empty(shape, dtype=dtype, device="meta")
    return metas, places, pieces


def _pieces(
    directory: Path,
    name: str,
    one: Made,
    where: Mapping[tuple[str, tuple[int, ...]], Made],
    sizes: Mapping[str, int],
    itemsize: int,
) -> list[_Piece]:
    found, chunks = [], one.fields.get("chunks")
    if not isinstance(chunks, list) or not all(isinstance(chunk, Made) for chunk in chunks):
        raise PickleError(f"it does not say of which pieces {name!r} is")
    for chunk in chunks:
        begin, box = _shape(chunk.fields.get("offsets")), _shape(chunk.fields.get("sizes"))
        info = where.get((name, begin))
        if info is None:
            raise PickleError(f"it does not say where a piece of {name!r} is")
        file, offset, length = (info.fields.get(field) for field in ("relative_path", "offset", "length"))
        if info.fields.get("transform_descriptors"):
            raise PickleError(f"{name!r} is compressed or transformed, which is not read here")
        if not isinstance(file, str) or file not in sizes or not source.stays_inside(directory, file):
            raise PickleError(f"{name!r} would be in {str(file)[:100]!r}, which is no {ENDING} file of this folder")
        if not isinstance(offset, int) or not isinstance(length, int) or not 0 <= offset <= sizes[file] - length:
            raise PickleError(f"a piece of {name!r} would be outside of {file}")
        if math.prod(box) * itemsize > length:
            raise PickleError(f"a piece of {name!r} would be larger than its {length:,} bytes")
        found.append(_Piece(begin, box, directory / file, offset, length))
    return found


def _check_cover(name: str, shape: tuple[int, ...], pieces: Sequence[_Piece]) -> None:
    """Every number of the tensor must be in one piece, and in one alone."""
    boxes = [(piece.begin, piece.sizes) for piece in pieces if math.prod(piece.sizes)]
    inside = all(
        len(begin) == len(sizes) == len(shape) and all(b + s <= n for b, s, n in zip(begin, sizes, shape, strict=True))
        for begin, sizes in boxes
    )
    apart = inside and sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape) and _apart(boxes, 0)
    if not apart:
        raise PickleError(f"the pieces of {name!r} do not make up the whole tensor, each number once")


def _apart(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], axis: int) -> bool:
    """Whether no two boxes overlap: those that overlap along one axis must be apart along the next ones."""
    if len(boxes) < 2:
        return True
    if axis == len(boxes[0][0]):
        return False
    boxes.sort(key=lambda box: box[0][axis])
    together, end = [boxes[0]], boxes[0][0][axis] + boxes[0][1][axis]
    for box in boxes[1:]:
        if box[0][axis] >= end:
            if not _apart(together, axis + 1):
                return False
            together = []
        together.append(box)
        end = max(end, box[0][axis] + box[1][axis])
    return _apart(together, axis + 1)


def _nested(metas: Mapping[str, Tensor], places: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
    """The state as it was before its names were joined, so that the weights are found as in any other file."""
    whole: dict[str, Any] = {}
    for name, meta in metas.items():
        *above, last = places.get(name, (name,)) or (name,)
        if not all(isinstance(step, str) for step in (*above, last)):
            continue  # in a list, as states of optimisers have them
        inner = whole
        for step in above:
            inner = inner.setdefault(str(step), {})
            if not isinstance(inner, dict):
                raise PickleError(f"{name!r} would be inside of a tensor")
        inner[str(last)] = meta
    return whole


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise PickleError("a name is no text")
    return value


def _shape(value: object) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    inner = value.arguments if isinstance(value, Made) and value.name == "torch.Size" else None
    numbers = inner[0] if isinstance(inner, tuple) and len(inner) == 1 else None
    whole = isinstance(numbers, tuple) and all(type(n) is int and 0 <= n < 2**48 for n in numbers)
    if not isinstance(numbers, tuple) or not whole or len(numbers) > _MOST_DIMENSIONS:
        raise PickleError("a shape is none")
    return numbers


def _dtype(properties: object) -> torch.dtype:
    """The first of the properties, which are kept as a tuple."""
    state = properties.state if isinstance(properties, Made) else None
    named = state[0] if isinstance(state, tuple) and state else None
    dtype = getattr(torch, named.name.rpartition(".")[2], None) if isinstance(named, Named) else None
    if not isinstance(dtype, torch.dtype):
        raise PickleError("a tensor has no known type")
    return dtype
