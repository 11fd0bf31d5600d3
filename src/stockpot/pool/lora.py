"""LoRA adapters as PEFT saves them, read as the models they make of their base: theta_k = theta_0 + s B A.

Only what has this exact linear form is taken; everything else is refused by its name. Materialising is lazy: a tensor
of an ingredient is computed when it is asked for, in fp32 or better, and rounded once, to the base's dtype.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from stockpot.errors import CheckpointError, MismatchError, PoolError, describe
from stockpot.files import read_json
from stockpot.pool.checkpoint import Rename, open_checkpoint
from stockpot.pool.discover import ADAPTER_WEIGHTS as WEIGHTS
from stockpot.pool.safetensors_files import open_safetensors
from stockpot.pool.scan import raw_bytes
from stockpot.pool.source import (
    Checkpoint,
    TensorSpec,
    dtype_name,
    is_directory,
    listed,
    natural_order,
    reason,
    refusal,
    shown,
)
from stockpot.pool.torch_files import open_torch

CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
# Every field of a LoRA configuration that leaves delta = s B A as it is. Any other field that is set is refused: this
# version cannot know what it does.
_HARMLESS = re.compile(
    "alpha_pattern|auto_mapping|base_model_name_or_path|bias|eva_config|exclude_modules|fan_in_fan_out|inference_mode"
    "|init_lora_weights|layers_pattern|layers_to_transform|loftq_config|lora_alpha|lora_bias|lora_dropout"
    "|megatron_core|modules_to_save|peft_type|peft_version|qalora_group_size|r|rank_pattern|revision|runtime_config"
    "|target_modules|task_type|use_rslora"
)
_NAMED = {
    "use_dora": "DoRA, which divides by the length of each mixed column",
    "alora_invocation_tokens": "aLoRA, which acts on some tokens only",
    "layer_replication": "layer_replication, which gives the model other layers than its base",
    "target_parameters": "target_parameters, whose deltas are inside fused experts",
    "kasa_config": "KaSA, which changes the base",
    "use_qalora": "QA-LoRA, which pools its inputs",
    "trainable_token_indices": "trainable tokens, which replace rows of the embedding",
}
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # values of init_lora_weights that keep the base
_FIX = "leave it out of the pool, or merge it into a full checkpoint first (merge_and_unload) and mix such checkpoints"


@dataclass(frozen=True)
class Factors:
    """s B A of one module: where the factors are in the file. A: (r, in), B: (out, r), both with kernel sizes behind
    where the module is a convolution."""

    A: str
    B: str
    scale: float
    transposed: bool  # the base keeps the weight as (in, out), or an embedding as (words, dimensions)


@dataclass(frozen=True, eq=False)
class Adapter:
    """One opened PEFT folder; names are the model's, without PEFT's prefix."""

    path: Path
    config: Mapping[str, Any]
    file: Checkpoint
    factors: Mapping[str, Factors]  # weight of the model -> its factors
    dense: Mapping[str, str]  # tensor of the model that is replaced -> its name in the file
    added: Mapping[str, tuple[str, float]]  # bias of the model -> what is added to it, and its scale (lora_bias)

    @property
    def base(self) -> tuple[str, str]:
        """What it was trained on: name or path, and revision."""
        return str(self.config.get("base_model_name_or_path") or ""), str(self.config.get("revision") or "main")


def adapter_folder(path: Path) -> Path | None:
    """The folder of an adapter that is meant by this path; None where it is something else."""
    folder = path if is_directory(path) else path.parent if path.name in WEIGHTS else None
    return folder if folder is not None and (folder / CONFIG).is_file() else None


def open_adapter(folder: Path) -> Adapter:
    """Read the configuration and the header, and refuse whatever is not s B A."""
    config = _config(folder)
    file = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
    if file is None:
        raise refusal(folder, f"an adapter's weights ({' or '.join(WEIGHTS)})", "none of them", "copy it again")
    opened = open_safetensors(file) if file.suffix == ".safetensors" else open_torch(file)
    pairs: dict[str, dict[str, str]] = {}  # module -> {"A": key, "B": key, "bias": key}
    dense: dict[str, str] = {}
    odd: list[str] = []
    for key in opened.specs:
        name = key.removeprefix(_PREFIX)
        match = re.fullmatch(r"(.+)\.lora_(?:(A|B)\.(weight|bias)|embedding_(A|B))", name)
        if name == key or (match and match[2] == "A" and match[3] == "bias"):
            odd.append(key)
        elif match:
            kind = "bias" if match[3] == "bias" else (match[2] or match[4])
            pairs.setdefault(match[1], {})[kind + ("" if match[2] else "e")] = key
        elif "lora_" in name.rpartition(".")[2] or ".lora_" in name:
            odd.append(key)
        elif ".original_module." not in name:  # with bias="all" PEFT also saves what modules_to_save has replaced,
            plain = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            dense[plain] = dense.get(plain, key) if plain != name else key  # and some biases under two names
    if odd:
        found = f"{len(odd)} it does not know: {listed(odd)}"
        raise refusal(folder, "the tensors of a LoRA adapter (lora_A, lora_B, modules_to_save, biases)", found, _FIX)
    lone = [
        module for module, found in pairs.items() if not ({"A", "B"} <= found.keys() or {"Ae", "Be"} <= found.keys())
    ]
    if lone or not pairs:
        found = f"one of the two missing for {listed(lone)}" if lone else "none"
        raise refusal(folder, "lora_A and lora_B of every module", found, "save or download the adapter again")
    factors: dict[str, Factors] = {}
    added: dict[str, tuple[str, float]] = {}
    for module, keys in pairs.items():
        embedding = "Ae" in keys
        A, B = (keys["Ae"], keys["Be"]) if embedding else (keys["A"], keys["B"])
        rank = _number(folder, config, "rank_pattern", "r", module)
        alpha = _number(folder, config, "alpha_pattern", "lora_alpha", module)
        shapes = opened.specs[A].shape, opened.specs[B].shape
        if len(shapes[0]) < 2 or len(shapes[1]) < 2 or shapes[0][0] != rank or shapes[1][1] != rank:
            found = f"factors of shapes {list(shapes[0])} and {list(shapes[1])}"
            fix = "use the configuration that was saved with these weights; its rank also decides the scale"
            raise refusal(f"{shown(folder)}, module {module}", f"rank {rank:g}, as {CONFIG} says", found, fix)
        if not all(opened.specs[key].dtype.is_floating_point for key in (A, B)):
            raise refusal(folder, "factors of a floating-point type", dtype_name(opened.specs[A].dtype), _FIX)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        factors[f"{module}.weight"] = Factors(A, B, scale, embedding or bool(config.get("fan_in_fan_out")))
        if "bias" in keys:
            added[f"{module}.bias"] = (keys["bias"], scale)
    if not any(bool(opened.tensor(one.B).any()) for one in factors.values()) and not dense:
        found = "B of zeros in every module: nothing was trained, it is the base itself"
        raise refusal(folder, "a trained adapter", found, "leave it out of the pool")
    return Adapter(folder, config, opened, factors, dense, added)


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = read_json(folder / CONFIG, follow=True)
    except (OSError, ValueError) as error:
        found = f"no valid JSON ({reason(error)})"
        raise refusal(folder / CONFIG, "a PEFT configuration", found, "save the adapter again") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise refusal(folder, "a LoRA adapter (peft_type LORA)", repr(kind)[:80], _FIX)
    start = config.get("init_lora_weights", True)
    problem = next((text for field, text in _NAMED.items() if config.get(field)), None)
    if start not in _PLAIN_STARTS:
        problem = f"init_lora_weights {start!r:.40}, which changes the base it starts from"
    if problem is None:
        unknown = sorted(str(field) for field, value in config.items() if value and not _HARMLESS.fullmatch(field))
        problem = f"settings that this version does not know: {listed(unknown)}" if unknown else None
    if problem is not None:
        raise refusal(folder, "an adapter that adds s B A to its base", problem, _FIX)
    return MappingProxyType(config)


def _number(folder: Path, config: Mapping[str, Any], patterns: str, default: str, module: str) -> float:
    """The rank or alpha of a module: that of the first pattern which matches the end of its name, as in PEFT."""
    table = config.get(patterns) or {}
    value = config.get(default)
    for pattern, own in table.items() if isinstance(table, dict) else ():
        # A stranger's pattern could keep the matcher busy for ever: repetition of groups is what it takes.
        if len(pattern) > 500 or len(re.findall(r"[*+{]", pattern)) > 3 or re.search(r"\)[*+{]", pattern):
            found = f"the pattern {pattern!r:.80}"
            raise refusal(
                folder / CONFIG, f"plain names or simple patterns in {patterns}", found, "write names instead"
            )
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            found = f"{pattern!r:.80} ({reason(error)})"
            raise refusal(folder / CONFIG, f"patterns in {patterns}", found, "save the adapter again") from error
        if matches:
            value = own
            break
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**31:
        expected = f"a positive number for {default}"
        raise refusal(folder / CONFIG, expected, repr(value)[:80], "save the adapter again")
    return float(value)


# ---- adapters on their base


def open_adapters(
    folders: Sequence[Path], base: str | Path | None, rename: Rename | None
) -> tuple[list[Checkpoint], dict[str, TensorSpec], Adapters]:
    """Every adapter as the model it makes of the base, what all of them have, and the factors behind it."""
    opened, problems = [], []
    for folder in folders:
        try:
            opened.append(open_adapter(folder))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(problems))
    _check_one_base(opened, explicit=base is not None)
    found = _base(opened, base, rename)
    _check_untied(opened, found)
    specs = dict(found.specs)
    lacking = {name for one in opened for name in one.dense if name not in specs}  # such as a new classifier
    for one in opened:
        problems += _misfits(one, found, lacking, opened[0])
        for name in lacking & one.dense.keys():
            specs.setdefault(name, one.file.specs[one.dense[name]])
    if problems:
        raise MismatchError("\n".join(problems))
    specs = {name: specs[name] for name in natural_order(tuple(specs))}
    adapters = Adapters(found, tuple(opened), specs)
    return [adapters.checkpoint(k) for k in range(len(opened))], specs, adapters


def _check_one_base(opened: Sequence[Adapter], *, explicit: bool) -> None:
    """All of them must name one base. A folder may have moved: where the base is given, its own name must agree."""
    kinds = {one: (Path(one.base[0]).name if explicit else one.base[0], one.base[1]) for one in opened}
    first = kinds[opened[0]]
    others = [
        f"{shown(one.path)} on {one.base[0]!r} at {one.base[1]!r}" for one, kind in kinds.items() if kind != first
    ]
    if others:
        expected = (
            f"one base for all adapters: {opened[0].base[0]!r} at {opened[0].base[1]!r} of {shown(opened[0].path)}"
        )
        fix = "mix adapters of one base; those of another make another pool"
        raise MismatchError.of("the adapters", expected=expected, found=f"others: {listed(others)}", fix=fix)


def _check_untied(opened: Sequence[Adapter], base: Checkpoint) -> None:
    """PEFT adds an embedding's delta to the embedding alone, even where the output layer has the same weights."""
    try:
        config = read_json(base.path / "config.json", follow=True) if is_directory(base.path) else {}
    except (OSError, ValueError):
        config = {}
    if not isinstance(config, dict) or not config.get("tie_word_embeddings"):
        return
    generates = [one for one in opened if one.config.get("task_type") in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM")]
    tied = [shown(one.path) for one in generates if any("lora_embedding_" in f.A for f in one.factors.values())]
    if tied:
        found = f"deltas of an embedding that the base ties to its output layer: {listed(tied)}"
        expected, fix = (
            "adapters that one set of weights can hold",
            "untie the base and train on that, or leave them out",
        )
        raise MismatchError.of("the adapters", expected=expected, found=found, fix=fix)


def _base(opened: Sequence[Adapter], base: str | Path | None, rename: Rename | None) -> Checkpoint:
    """The base model, under the names that the adapters' model has."""
    name, revision = opened[0].base
    path = Path(str(base) if base is not None else name).expanduser()
    if (base is None and not name) or not path.exists():
        cached = _cached(str(base) if base is not None else name, revision)
        if cached is None:
            found = f"{str(base or name)!r} neither as a path here nor in the Hugging Face cache"
            fix = "download the base and give its folder: Pool.open(..., base='path/to/base')"
            raise PoolError.of(
                "the base of the adapters",
                expected="a local model folder or checkpoint",
                found=found if base or name else f"none named in {CONFIG}, and none given",
                fix=fix,
            )
        path = cached
    checkpoint = open_checkpoint(path, rename=rename)
    if rename is not None or (prefix := _prefix(checkpoint, opened)) is None:
        return checkpoint
    return open_checkpoint(path, rename=lambda name: prefix + name if prefix[0] != "-" else name[len(prefix) - 1 :])


def _prefix(base: Checkpoint, opened: Sequence[Adapter]) -> str | None:
    """What the adapters' model has before every name of its base (`bert.`), or, after a minus, has not."""
    wanted = {name for one in opened for name in one.factors}
    if wanted <= base.specs.keys():
        return None
    for name in sorted(wanted):
        parts = name.split(".")
        for cut in range(1, len(parts) - 1):
            prefix = ".".join(parts[:cut]) + "."
            if all(other.startswith(prefix) and other[len(prefix) :] in base.specs for other in wanted):
                return prefix
        break
    for stored in base.specs:
        first = stored.partition(".")[0] + "."
        if all(name.startswith(first) for name in base.specs) and all(first + name in base.specs for name in wanted):
            return "-" + first
        break
    return None


def _cached(name: str, revision: str) -> Path | None:
    """The folder of a model in the Hugging Face cache; nothing is downloaded."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # no such library, no such model, or a text that is no name: all the same to the caller
        return None


def _misfits(adapter: Adapter, base: Checkpoint, lacking: set[str], first: Adapter) -> list[str]:
    """What stands between an adapter and the base."""
    unknown = [name for name in (*adapter.factors, *adapter.added) if name not in base.specs]
    shapes, specs = [], adapter.file.specs
    for name, one in adapter.factors.items():
        made = _shape(one, specs)
        if name in base.specs and base.specs[name].shape != made:
            shapes.append(f"{name} has {list(made)} instead of {list(base.specs[name].shape)}")
    for name, key in adapter.dense.items():
        wanted = base.specs.get(name) or (first.dense.get(name) and first.file.specs[first.dense[name]])
        if wanted and wanted.shape != specs[key].shape:
            shapes.append(f"{name} has {list(specs[key].shape)} instead of {list(wanted.shape)}")
    for name, (key, _) in adapter.added.items():
        if name in base.specs and base.specs[name].shape != specs[key].shape:
            shapes.append(f"{name} has {list(specs[key].shape)} instead of {list(base.specs[name].shape)}")
    absent = sorted(lacking - adapter.dense.keys())
    sorts = {"not in the base": unknown, "of another shape": shapes, "saved by others, missing here": absent}
    found = [f"{len(texts)} {what}: {listed(texts)}" for what, texts in sorts.items() if texts]
    if not found:
        return []
    expected = f"deltas of tensors that {shown(base.path)} has"
    fix = "give the base that this adapter was trained on (base=), or leave the adapter out"
    return [describe(shown(adapter.path), expected=expected, found="; ".join(found), fix=fix)]


def _shape(one: Factors, specs: Mapping[str, TensorSpec]) -> tuple[int, ...]:
    A, B = specs[one.A].shape, specs[one.B].shape
    return (*A[1:], B[0]) if one.transposed else (B[0], *A[1:])


@dataclass(frozen=True, eq=False)
class Adapters:
    """K adapters on one base."""

    base: Checkpoint
    each: tuple[Adapter, ...]
    specs: Mapping[str, TensorSpec]

    def part(self, chosen: Sequence[int]) -> Adapters:
        return Adapters(self.base, tuple(self.each[k] for k in chosen), self.specs)

    def checkpoint(self, k: int) -> Checkpoint:
        """Adapter k as the whole model it makes."""
        one = self.each[k]
        files = (one.path / CONFIG, *one.file.files, *self.base.files)
        return Checkpoint(one.path, "lora", files, MappingProxyType(self.specs), lambda name: self.tensor(k, name))

    def tensor(self, k: int, name: str) -> Tensor:
        """theta_0 + s B A, or what the adapter has instead, in the dtype of the pool."""
        one, dtype = self.each[k], self.specs[name].dtype
        if name in one.dense:
            made = one.file.tensor(one.dense[name])
        else:
            made = self.base.tensor(name)
        if name in one.added:
            key, scale = one.added[name]
            made = made.to(_wide(dtype)) + scale * one.file.tensor(key).to(_wide(dtype))
        if name in one.factors:
            made = made.to(_wide(dtype)) + self.delta(k, name, _wide(dtype))
        return made.to(dtype)

    def delta(self, k: int, name: str, dtype: torch.dtype) -> Tensor:
        """s B A in the shape of the base's tensor."""
        file, factors = self.each[k].file, self.each[k].factors[name]
        A, B = (file.tensor(key).to(dtype) for key in (factors.A, factors.B))
        product = (B.flatten(1) @ A.flatten(1)) * factors.scale  # (out, in)
        return product.T if factors.transposed else product.view(B.shape[0], *A.shape[1:])

    def digests(self, base: str) -> tuple[str, ...]:
        """SHA-256 of each ingredient: of the base's digest, and of every tensor and scale of the adapter.

        Not of the product: its last bits depend on the machine that multiplies.
        """
        return tuple(_digest(one, base) for one in self.each)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _digest(adapter: Adapter, base: str) -> str:
    total = hashlib.sha256(json.dumps(["lora", base]).encode() + b"\n")
    scales = {key: one.scale for one in adapter.factors.values() for key in (one.A, one.B)}
    for key in sorted(adapter.file.specs):
        spec = adapter.file.specs[key]
        content = hashlib.sha256(raw_bytes(adapter.file.tensor(key)).numpy().data).hexdigest()
        line = [key, dtype_name(spec.dtype), list(spec.shape), content, scales.get(key)]
        total.update(json.dumps(line).encode() + b"\n")
    return total.hexdigest()
