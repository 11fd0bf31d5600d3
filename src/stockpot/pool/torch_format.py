"""Files of torch.save. The only call of torch.load: weights only, memory-mapped, with no way around it."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.errors import CheckpointError, describe
from stockpot.pool.allowed import check_table
from stockpot.pool.archive import ArchiveError, check_archive
from stockpot.pool.files import PICKLE, SAFETENSORS, ZIP, looks_like, reason, require_file, shown
from stockpot.pool.nesting import find_weights, shown_key
from stockpot.pool.pickles import CodeError
from stockpot.pool.source import Source
from stockpot.pool.spec import TensorSpec

_MOST_NAMES = 64
_COPY_AGAIN = "copy or download it again, or leave it out of the pool"
_SAVE_AGAIN = (
    "if you trust its origin, load it where it was made and save it again with "
    "safetensors.torch.save_file(state_dict, 'model.safetensors') or torch.save(state_dict, path)"
)


def open_torch(path: Path, key: str | None = None) -> Source:
    size = require_file(path)
    weights = find_weights(_load(path), key, shown(path))
    tensors: dict[str, Tensor] = {}
    ignored: list[str] = []
    for name, value in weights.tensors.items():
        if isinstance(name, str) and isinstance(value, Tensor):
            tensors[name] = _plain(value, name, path, size)
        else:
            ignored.append(shown_key(name))
    _check_total(tensors, path, size)
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return Source(
        "torch",
        (path,),
        specs,
        tensors.__getitem__,
        aliases=_aliases(tensors),
        key=weights.key,
        other_keys=weights.others,
        ignored=tuple(ignored),
    )


def _load(path: Path) -> object:
    looks = looks_like(path)
    if looks != ZIP:
        raise CheckpointError(_not_zip(path, looks))
    try:
        archive = check_archive(path)
        if archive.program:
            raise CheckpointError(_wants_code(path, None))
        check_table(archive.table, archive.sizes)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # notes on deprecated storages inside old files are not for our user
            loaded: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except ArchiveError as error:
        found, fix = f"a damaged or truncated archive ({reason(error)})", _COPY_AGAIN
    except CodeError as error:
        raise CheckpointError(_wants_code(path, error.name)) from error
    except CheckpointError:
        raise
    except Exception as error:  # whatever a hostile file provokes, the user gets our error
        found, fix = (
            f"something torch cannot read as weights ({_last_reason(error)})",
            f"{_SAVE_AGAIN}; or {_COPY_AGAIN}",
        )
    else:
        return _without_attributes(loaded)
    raise CheckpointError(describe(shown(path), expected="a whole file of torch.save", found=found, fix=fix))


def _without_attributes(loaded: object) -> object:
    """An OrderedDict's own attributes come from the file too, and would stand before its methods."""
    todo, seen = [loaded], set[int]()
    while todo:
        thing = todo.pop()
        if isinstance(thing, dict) and id(thing) not in seen:
            seen.add(id(thing))
            if isinstance(thing, OrderedDict):
                thing.__dict__.clear()
            todo += dict.values(thing)
    return loaded


def _last_reason(error: Exception) -> str:
    """Torch puts advice to switch the protection off around the reason. That advice must not reach anyone here."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and "weights_only" not in line]
    if not lines:
        return type(error).__name__
    return shown(lines[-1].rpartition("WeightsUnpickler error: ")[2].rstrip("."))[:200]


def _not_zip(path: Path, looks: str) -> str:
    if looks == PICKLE:
        fix = _SAVE_AGAIN
    elif looks == SAFETENSORS:
        fix = "rename it so that it ends in .safetensors"
    else:
        fix = _COPY_AGAIN
    return describe(
        shown(path), expected="the zip format that torch.save has written since 1.6", found=looks, fix=fix
    )


def _wants_code(path: Path, name: str | None) -> str:
    what = (
        f"the file asks for {shown(name)[:200]}, which is not plain tensor data"
        if name
        else "a TorchScript program"
    )
    return describe(
        shown(path),
        expected="tensors and plain values only",
        found=f"{what}; opening it would run code from the file, so it was refused and nothing was run",
        fix=(
            "if you trust its origin, load it where it was made and save only its state_dict, best with "
            "safetensors.torch.save_file; if you do not, delete it"
        ),
    )


def _plain(value: Tensor, name: str, path: Path, size: int) -> Tensor:
    """The bare strided CPU tensor; anything that cannot be averaged element by element is refused."""
    problem = None
    if type(value) not in (Tensor, nn.Parameter):
        problem = f"a {type(value).__name__}"
    elif value.is_nested:
        problem = "a nested tensor"
    elif value.layout != torch.strided:
        problem = f"a sparse tensor ({str(value.layout).removeprefix('torch.')})"
    elif value.is_quantized:
        problem = f"a quantised tensor ({str(value.dtype).removeprefix('torch.')})"
    elif value.device.type != "cpu":
        problem = f"a tensor without data (device {value.device.type})"
    elif math.prod(value.shape) * value.dtype.itemsize > max(size, 4096):
        # A stride of zero lets a file of a kilobyte declare a terabyte.
        problem = f"a shape {list(value.shape)} with more data than the whole file"
    if problem is not None:
        raise CheckpointError(
            describe(
                f"{shown(path)}, tensor {shown(name)[:200]!r}",
                expected="an ordinary dense tensor",
                found=problem,
                fix="save it dense (contiguous(), to_dense(), dequantize()), or leave this file out of the pool",
            )
        )
    # By the class: attributes of the tensor itself come from the file.
    return Tensor.resolve_neg(Tensor.resolve_conj(Tensor.detach(value)))


def _check_total(tensors: dict[str, Tensor], path: Path, size: int) -> None:
    """Many names for one stretch of data are fine, within reason: a soup is written as large as its names say."""
    total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    if total > _MOST_NAMES * max(size, 2**20):
        raise CheckpointError(
            describe(
                shown(path),
                expected=f"at most {_MOST_NAMES} times as many bytes of tensors as the file has",
                found=f"{total:,} bytes in a file of {size:,}",
                fix="save it with contiguous() tensors, or leave this file out of the pool",
            )
        )


def _aliases(tensors: dict[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    """Names that are one tensor in the file. Views of different parts of a storage are different tensors."""
    places: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel():
            places[tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()].append(name)
    return tuple(tuple(names) for names in places.values() if len(names) > 1)
