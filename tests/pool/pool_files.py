"""Checkpoint files for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

State = dict[str, Tensor]

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
)


def state(seed: int = 0) -> State:
    """A small model: a layer, a bias, a counter. The bias is the same for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(4, 3, generator=generator),
        "layer.bias": torch.arange(4.0),
        "steps": torch.tensor(7),
    }


def write(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """As the ending of the path says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(dict(tensors), path)
    else:
        torch.save(dict(tensors), path)
    return path


def write_shards(folder: Path, tensors: Mapping[str, Tensor], suffix: str = ".safetensors") -> Path:
    """A Hugging Face directory with one tensor in each shard."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    where = {}
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        where[name] = f"{stem}-{number:05}-of-{len(tensors):05}{suffix}"
        write(folder / where[name], {name: tensor})
    write_index(folder, where, suffix)
    return folder


def write_index(folder: Path, where: Mapping[str, object], suffix: str = ".safetensors") -> None:
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    index = {"metadata": {"total_size": 1}, "weight_map": dict(where)}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))


def bits(tensor: Tensor) -> list[int]:
    """The bytes, so that NaN equals NaN and -0 differs from 0."""
    found: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return found
