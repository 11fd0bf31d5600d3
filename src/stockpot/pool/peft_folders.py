"""One LoRA adapter as PEFT saves it: what is in its folder.

Only what has the exact linear form theta_0 + s B A is taken; everything else is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stockpot.files import read_json
from stockpot.pool.discover import ADAPTER_WEIGHTS as WEIGHTS
from stockpot.pool.safetensors_files import open_safetensors
from stockpot.pool.source import Checkpoint, dtype_name, is_directory, listed, reason, refusal, shown
from stockpot.pool.torch_files import open_torch

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
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
        name = key.removeprefix(PREFIX)
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
