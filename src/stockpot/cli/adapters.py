"""What `stockpot inspect` says of LoRA adapters, and which of them a soup could not take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stockpot import words
from stockpot.cli.terminal import say, shown, table
from stockpot.errors import PoolError, describe

if TYPE_CHECKING:
    from stockpot.pool import Pool
    from stockpot.pool.lora import Adapters


def without_refused(sources: Sequence[str], options: Mapping[str, Any], error: PoolError) -> tuple[Pool, list[str]]:
    """Of adapters, those that a soup could take, and why it could not take the others."""
    from stockpot.pool import Pool
    from stockpot.pool.discover import find_checkpoints
    from stockpot.pool.lora import sorted_out
    from stockpot.pool.peft_folders import adapter_folder

    paths, wrong = find_checkpoints(sources)
    folders = [folder for path in paths if (folder := adapter_folder(path)) is not None]
    if wrong or len(folders) < 3:
        raise error
    usable, refused = sorted_out(folders, options["base"], options["rename"])
    full = [path for path in paths if adapter_folder(path) is None]
    expected, fix = "a LoRA adapter, as the others are", "leave it out, or merge the adapters into full checkpoints"
    refused += [describe(shown(path), expected=expected, found="a full checkpoint", fix=fix) for path in full]
    if len(usable) < 2:
        raise error
    return Pool.open(*usable, **options), refused


def describe_adapters(adapters: Adapters, found: dict[str, Any]) -> None:
    """Ranks, scales and targets, and how long and how alike the deltas are, by their factors alone."""
    from stockpot.pool.lora_scan import inner_products
    from stockpot.run.shapes import plain

    products = inner_products(adapters)  # (K, K)
    lengths = products.diagonal().clamp_min(0).sqrt()
    cosines = products / (lengths[:, None] * lengths[None, :])
    for k, (one, entry) in enumerate(zip(adapters.each, found["ingredients"], strict=True)):
        ranks = sorted({one.file.specs[factors.A].shape[0] for factors in one.factors.values()})
        scales = sorted({factors.scale for factors in one.factors.values()})
        targets = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in one.factors})
        others = cosines[k].clone().nan_to_num(-2)
        others[k] = -2
        near = int(others.argmax())
        entry["adapter"] = {
            "ranks": ranks, "scales": scales, "targets": targets, "modules": len(one.factors),
            "whole_tensors": len(one.dense) + len(one.added), "base": one.base[0], "revision": one.base[1],
            **plain({"norm": float(lengths[k]), "cosine": float(cosines[k, near])}),
            "nearest": found["ingredients"][near]["name"],
        }  # fmt: skip
    found["cosines"] = plain(cosines.tolist())


def show_adapters(found: Mapping[str, Any]) -> None:
    def span(values: Sequence[float]) -> str:
        return f"{values[0]:.4g}" + (f" to {values[-1]:.4g}" if len(values) > 1 else "")

    rows: list[tuple[str, ...]] = []
    for entry in found["ingredients"]:
        one = entry["adapter"]
        cosine = "–" if one["cosine"] is None else f"{words.middle(one['nearest'], 24)} ({one['cosine']:.2f})"
        norm = "not finite" if one["norm"] is None else f"{one['norm']:.4g}"
        more = f" and {one['whole_tensors']} whole tensors" if one["whole_tensors"] else ""
        names = ", ".join(one["targets"][:4]) + (", ..." if len(one["targets"]) > 4 else "") + more
        rows.append((entry["name"], span(one["ranks"]), span(one["scales"]), norm, cosine, names))
    say(f"LoRA adapters on {shown(Path(found['base']['path']))}\n")
    table(("adapter", "rank", "scale", "norm of delta", "most alike (cosine)", "targets"), rows)
