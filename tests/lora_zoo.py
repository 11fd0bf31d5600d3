"""Pools of LoRA adapters as PEFT saves them, written by hand: of any small model, with random factors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stockpot import Pool


def write_adapter(
    folder: Path, base: Mapping[str, Tensor], modules: Mapping[str, int], seed: int, *, spread: float = 0.3, **more: Any
) -> Path:
    """Factors for these modules (name -> rank); `more` are settings, or full tensors under `dense`."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    embeddings = more.pop("embeddings", ())
    for module, rank in modules.items():
        weight = base[f"{module}.weight"]
        out, *rest = weight.shape
        if module in embeddings or more.get("fan_in_fan_out"):
            out, rest = weight.shape[1], [weight.shape[0]]
        shapes = {"A": (rank, *rest), "B": (out, rank, *[1] * (len(rest) - 1))}
        for letter, shape in shapes.items():
            key = f"lora_embedding_{letter}" if module in embeddings else f"lora_{letter}.weight"
            value = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
            state[f"base_model.model.{module}.{key}"] = value.to(weight.dtype)
    state |= {f"base_model.model.{name}": value.clone() for name, value in more.pop("dense", {}).items()}
    folder.mkdir(parents=True)
    save_file(state, folder / "adapter_model.safetensors")
    ranks = {"r": next(iter(modules.values())), "rank_pattern": dict(modules), "lora_alpha": 2 * max(modules.values())}
    config = {"peft_type": "LORA", "base_model_name_or_path": str(folder.parent.parent / "base.safetensors")}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **ranks, **more}))
    return folder


def adapter_pool(
    folder: Path,
    build: Callable[[], nn.Module],
    each: list[dict[str, int]],
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Pool:
    """One adapter for every entry of `each`, on a base with random weights."""
    torch.manual_seed(0)
    base = {name: value.detach().clone() for name, value in build().to(dtype).state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(base, folder / "base.safetensors")
    own = more.pop("own", {})  # settings of single adapters
    for k, modules in enumerate(each):
        write_adapter(folder / "adapters" / f"a{k}", base, modules, k, **{**more, **own.get(k, {})})
    return Pool.open(folder / "adapters", base=folder / "base.safetensors")


def merged(pool: Pool, folder: Path) -> Pool:
    """The same pool as full checkpoints, with the adapters' digests: who learns with whom goes by them."""
    folder.mkdir()
    for k, name in enumerate(pool.names):
        save_file({n: pool.tensor(k, n).clone().contiguous() for n in pool.specs}, folder / f"{name}.safetensors")
    full = Pool.open([folder / f"{name}.safetensors" for name in pool.names])
    full._scan = replace(full.scanned(lambda _: None), digests=pool.digests())
    return full
