"""Directories in the form that Hugging Face libraries write: one file, or shards with an index."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from stockpot.errors import CheckpointError, describe
from stockpot.pool.files import SUFFIXES, listed, reason, require_file, shown, stays_inside
from stockpot.pool.safetensors_format import open_safetensors
from stockpot.pool.source import Source
from stockpot.pool.spec import TensorSpec
from stockpot.pool.torch_format import open_torch
from stockpot.small_files import read_json

# In the order in which the libraries themselves look, so that we mix the weights the user evaluates.
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.bin.index.json",
)
_LEFTOVER = re.compile(
    r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args)(_\d+)*\.\w+"
)  # exact names: `optimizer_adam.pt` may well be an ingredient


def is_leftover(path: Path) -> bool:
    """What trainers write beside the weights."""
    return _LEFTOVER.fullmatch(path.name) is not None


def weights_of(directory: Path) -> Path | None:
    """The file that holds or indexes the weights, or `None` if this directory is no checkpoint itself."""
    present = {entry.name for entry in directory.iterdir()}
    known = [name for name in _NAMES if name in present]
    tensor_files = [
        directory / name for name in sorted(present) if name.endswith(SUFFIXES) and name[0] != "."
    ]
    others = [path for path in tensor_files if not is_leftover(path) and path.name not in _NAMES]
    # soup.json: a saved soup, which may have recalibrated statistics in a file of their own beside the weights.
    if known and ("config.json" in present or "soup.json" in present):
        return directory / known[0]
    if any(name.endswith(".index.json") for name in known):
        return directory / known[0]
    if known and not others:  # otherwise a folder of checkpoints, one of which happens to have this name
        return directory / known[0]
    single = [path for path in others if path.suffix == ".safetensors"]
    if not known and "config.json" in present and len(single) == 1:
        return single[0]
    return None


def open_directory(directory: Path) -> Source:
    try:
        weights = weights_of(directory)
    except OSError as error:
        raise CheckpointError(
            describe(
                shown(directory),
                expected="a checkpoint directory",
                found=reason(error),
                fix="check the path and its permissions",
            )
        ) from error
    if weights is None:
        raise CheckpointError(
            describe(
                shown(directory),
                expected="a Hugging Face directory (model.safetensors, pytorch_model.bin or an index)",
                found="none of these files in it",
                fix="give the path of one checkpoint; a folder of several is a pool (Pool.open, `stockpot inspect`)",
            )
        )
    if weights.name.endswith(".index.json"):
        return _open_shards(directory, weights)
    return _opener(weights.name)(weights)


def _opener(name: str) -> Callable[[Path], Source]:
    return open_safetensors if name.endswith(".safetensors") else open_torch


def _open_shards(directory: Path, index: Path) -> Source:
    where = _read_index(index)
    suffix = ".safetensors" if ".safetensors." in index.name else ".bin"
    shards: dict[str, Source] = {}
    problems: list[str] = []
    for name in sorted(set(where.values())):
        problem = _unsafe(directory, name, suffix)
        if problem is None:
            try:
                shards[name] = _opener(name)(directory / name)
            except CheckpointError as error:
                problem = str(error)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise CheckpointError("\n".join(problems))
    _check_agreement(index, where, shards)
    specs: dict[str, TensorSpec] = {name: shards[shard].specs[name] for name, shard in where.items()}

    def read(name: str) -> Tensor:
        return shards[where[name]].read(name)

    return Source(
        "safetensors-sharded" if suffix == ".safetensors" else "torch-sharded",
        (index, *(directory / name for name in shards)),
        specs,
        read,
        aliases=tuple(group for shard in shards.values() for group in shard.aliases),
        ignored=tuple(name for shard in shards.values() for name in shard.ignored),
    )


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name -> name of the shard."""
    try:
        require_file(index)
        content = read_json(index)
        where = content.get("weight_map") if isinstance(content, dict) else None
        if isinstance(where, dict) and where and all(isinstance(name, str) for name in where.values()):
            return where
        found = "JSON without a weight_map of tensor names to file names"
    except (OSError, ValueError) as error:
        found = f"no valid JSON ({reason(error)})"
    raise CheckpointError(
        describe(shown(index), expected="an index of shards", found=found, fix="download the directory again")
    )


def _unsafe(directory: Path, name: str, suffix: str) -> str | None:
    """Why a shard name from an index must not be opened. An index may only speak of its own directory."""
    expected = "plain names of files in this directory"
    fix = "do not use this directory unless you know why it points elsewhere; download it again"
    subject = f"{shown(directory)}, index of shards"
    if not name.endswith(suffix) or name != Path(name).name or any(mark in name for mark in "/\\:\0"):
        return describe(subject, expected=f"{expected}, ending in {suffix}", found=repr(name)[:120], fix=fix)
    if not stays_inside(directory, name):
        return describe(subject, expected=expected, found=f"{name!r}, a link out of it", fix=fix)
    return None


def _check_agreement(index: Path, where: dict[str, str], shards: dict[str, Source]) -> None:
    absent = [
        f"{name!r} is not in {shard}" for name, shard in where.items() if name not in shards[shard].specs
    ]
    unlisted = [
        f"{name!r} in {shard} is not listed"
        for shard, source in shards.items()
        for name in source.specs
        if where.get(name) != shard
    ]
    lies = absent + unlisted
    if lies:
        raise CheckpointError(
            describe(
                shown(index),
                expected="an index that agrees with its shards",
                found=listed(lies, 3),
                fix="download or save the directory again; index and shards are from different models",
            )
        )
