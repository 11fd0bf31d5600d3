"""One LoRA adapter as PEFT saves it: what is in its folder.

Only what has the exact linear form theta_0 + s B A is taken; everything else is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from stockpot.files import read_json
from stockpot.pool.checkpoint import open_safetensors
from stockpot.pool.discover import ADAPTER_WEIGHTS as WEIGHTS
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
# Values of init_lora_weights that keep the base.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_FIX = "leave it out of the pool, or merge it into a full checkpoint first (merge_and_unload) and mix such checkpoints"

_LONGEST = 500  # letters of a module's name, and of a pattern
_MOST_WORK = 2_000_000  # patterns times modules; 10,000 patterns take half a second to read
_CHOICE = re.compile(r"[()|*+?{}]")
_PIECE = re.compile(r"\\[dDwWsS]|\\[^\w\s]|\[\^?[^\[\]\\^]+\]|\(\?:|[^\[\]\\]")  # a letter, class, or sign of a pattern
Alternatives = list[list[tuple[Any, str]]]  # sequences of (letter, class or group, and what follows it: *, +, ?)
Patterns = list[tuple[Callable[[str, Mapping[str, int]], bool], Any]]  # what matches, and the value for it


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
        if len(name) > _LONGEST:
            raise refusal(folder, f"names of at most {_LONGEST} letters", f"{name!r:.80}", _FIX)
        match = re.fullmatch(r"(.+)\.lora_(?:(A|B)\.(weight|bias)|embedding_(A|B))", name)
        if name == key or (match and match[2] == "A" and match[3] == "bias"):
            odd.append(key)
        elif match:
            kind = "bias" if match[3] == "bias" else (match[2] or match[4])
            pairs.setdefault(match[1], {})[kind + ("" if match[2] else "e")] = key
        elif "lora_" in name.rpartition(".")[2] or ".lora_" in name:
            odd.append(key)
        elif ".original_module." not in name:  # with bias="all" PEFT also saves what modules_to_save has replaced,
            plain = _plain_name(name, opened.specs)
            if not torch.equal(opened.tensor(dense.setdefault(plain, key)), opened.tensor(key)):  # and biases twice
                raise refusal(folder, f"one value for {plain[:200]}", "two that differ", "save the adapter again")
    if odd:
        found = f"{len(odd)} it does not know: {listed(odd)}"
        raise refusal(folder, "the tensors of a LoRA adapter (lora_A, lora_B, modules_to_save, biases)", found, _FIX)
    lone = [module for module, found in pairs.items() if found.keys() - {"bias"} not in ({"A", "B"}, {"Ae", "Be"})]
    if lone or not pairs:
        found = f"one of the two missing, or more, for {listed(lone)}" if lone else "none"
        raise refusal(folder, "lora_A and lora_B of every module", found, "save or download the adapter again")
    said = targets(config)
    if said is not None and (extra := [module for module in pairs if not named_by(said, module)]):
        found, fix = f"those of others: {listed(extra)}", "use the configuration that was saved with these weights"
        raise refusal(folder, f"factors of the target_modules in {CONFIG}: {listed(sorted(said))}", found, fix)
    ranks, alphas = (_patterns(folder, config, field, len(pairs)) for field in ("rank_pattern", "alpha_pattern"))
    factors: dict[str, Factors] = {}
    added: dict[str, tuple[str, float]] = {}
    for module, keys in pairs.items():
        embedding = "Ae" in keys
        A, B = (keys["Ae"], keys["Be"]) if embedding else (keys["A"], keys["B"])
        rank = _number(folder, config, ranks, "r", module)
        alpha = _number(folder, config, alphas, "lora_alpha", module)
        transposed = embedding or bool(config.get("fan_in_fan_out"))
        shapes = opened.specs[A].shape, opened.specs[B].shape
        if len(shapes[0]) < 2 or len(shapes[1]) < 2 or shapes[0][0] != rank or shapes[1][1] != rank:
            found = f"factors of shapes {list(shapes[0])} and {list(shapes[1])}"
            fix = "use the configuration that was saved with these weights; its rank also decides the scale"
            raise refusal(f"{shown(folder)}, module {module}", f"rank {rank:g}, as {CONFIG} says", found, fix)
        # What PEFT saves of an embedding or output layer beside its delta (save_embedding_layers) is no product.
        product = ".base_layer." not in dense.get(f"{module}.weight", ".base_layer.")
        if set(shapes[1][2:]) - {1} or (transposed and len(shapes[0]) > 2) or product:
            found = f"factors of shapes {list(shapes[0])} and {list(shapes[1])}"
            found += ", and the product itself" * product
            raise refusal(f"{shown(folder)}, module {module}", "two factors that can be multiplied", found, _FIX)
        if not all(opened.specs[key].dtype.is_floating_point for key in (A, B)):
            raise refusal(folder, "factors of a floating-point type", dtype_name(opened.specs[A].dtype), _FIX)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        factors[f"{module}.weight"] = Factors(A, B, scale, transposed)
        if "bias" in keys:
            added[f"{module}.bias"] = (keys["bias"], scale)
    if not any(bool(opened.tensor(one.B).any()) for one in factors.values()) and not dense:
        found = "B of zeros in every module: nothing was trained, it is the base itself"
        raise refusal(folder, "a trained adapter", found, "leave it out of the pool")
    return Adapter(folder, config, opened, factors, dense, added)


def _plain_name(name: str, there: Collection[str]) -> str:
    """The model's name of a tensor that PEFT has wrapped; some have the adapter's name (`default`) in them too."""
    plain = name.replace(".base_layer.", ".")
    with_adapter, without = (re.sub(rf"\.modules_to_save\.{part}", ".", plain) for part in (r"[^.]+\.", ""))
    return with_adapter if with_adapter != plain and PREFIX + with_adapter in there else without


def targets(config: Mapping[str, Any]) -> frozenset[str] | None:
    """The names in target_modules; None where a pattern or nothing stands there, which says nothing of one module."""
    said = config.get("target_modules")
    return frozenset(map(str, said)) if isinstance(said, list) else None


def named_by(said: frozenset[str], module: str) -> bool:
    """Whether one of the names is the module's, or its end behind a dot, as in PEFT."""
    pieces = module.split(".")
    return any(".".join(pieces[cut:]) in said for cut in range(len(pieces)))


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
    for field in ("use_rslora", "fan_in_fan_out"):
        if not isinstance(config.get(field), bool | None):
            raise refusal(folder / CONFIG, f"{field} true or false", repr(config[field])[:80], "save the adapter again")
    if problem is None:
        unknown = sorted(str(field) for field, value in config.items() if value and not _HARMLESS.fullmatch(field))
        problem = f"settings that this version does not know: {listed(unknown)}" if unknown else None
    if problem is not None:
        # It acts by the place of a token, so PEFT cannot merge it.
        fix = "leave it out of the pool" if config.get("alora_invocation_tokens") else _FIX
        raise refusal(folder, "an adapter that adds s B A to its base", problem, fix)
    return MappingProxyType(config)


# ---- ranks and alphas of single modules


def _number(folder: Path, config: Mapping[str, Any], table: Patterns, default: str, module: str) -> float:
    """The rank or alpha of a module: that of the first pattern which matches the end of its name, as in PEFT."""
    letters = _places(module)
    value = next((own for matches, own in table if matches(module, letters)), config.get(default))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**31:
        raise refusal(folder / CONFIG, f"a positive number for {default}", repr(value)[:80], "save the adapter again")
    return float(value)


def _patterns(folder: Path, config: Mapping[str, Any], field: str, modules: int) -> Patterns:
    """The patterns of a configuration, read once for all modules. Python's own matcher is asked only where nothing is
    repeated or chosen: a stranger's pattern could keep it busy for ever. All others are followed letter by letter."""
    table = config.get(field)
    if not isinstance(table, dict | None):
        raise refusal(folder / CONFIG, f"{field} as a table of names", repr(table)[:80], "save the adapter again")
    chosen = [pattern for pattern in table or () if _CHOICE.search(pattern)]
    if max(len(table or ()) * max(modules, 200), sum(map(len, chosen)) * modules) > _MOST_WORK:
        found, fix = f"{len(table or ()):,} for {modules:,} modules", "write fewer of them"
        raise refusal(folder / CONFIG, f"a bearable number of patterns in {field}", found, fix)
    made: Patterns = []
    for pattern, value in (table or {}).items():
        try:
            if len(pattern) > _LONGEST:
                raise ValueError("it is too long")
            if _CHOICE.search(pattern):
                pieces = _PIECE.findall(pattern)
                if "".join(pieces) != pattern:
                    raise ValueError("more than letters, classes, alternatives and repeated letters")
                made.append((partial(_ends, _alternatives(pieces[::-1])), value))
            else:
                made.append((partial(_plain, re.compile(rf"(?:.*\.)?(?:{pattern})\Z")), value))
        except (ValueError, re.error) as error:
            expected, found = f"plain names or simple patterns in {field}", f"{pattern!r:.80} ({reason(error)})"
            raise refusal(folder / CONFIG, expected, found, "write names instead") from error
    return made


def _alternatives(pieces: list[str], depth: int = 0) -> Alternatives:
    """What `a|b` may be, as sequences of a letter or group and what follows it; `pieces` are taken from the end."""
    found: Alternatives = [[]]
    while pieces:
        piece = pieces.pop()
        if piece == ")" and depth:
            return found
        if piece == "|":
            found.append([])
            continue
        if piece in (")", "*", "+", "?", "{", "}") or depth > 9:
            raise ValueError(f"{piece!r} at an odd place")
        atom = _alternatives(pieces, depth + 1) if piece in ("(", "(?:") else piece
        if isinstance(atom, str):
            re.compile(atom)  # such as [z-a]
        many = pieces.pop() if pieces and pieces[-1] in ("*", "+", "?") else ""
        if many in ("*", "+") and isinstance(atom, list):
            raise ValueError("a repeated group")
        found[-1].append((atom, many))
    if depth:
        raise ValueError("a group without an end")
    return found


def _places(name: str) -> dict[str, int]:
    """Where each letter of a name is: bit i for letter i."""
    found: dict[str, int] = {}
    for number, letter in enumerate(name):
        found[letter] = found.get(letter, 0) | 1 << number
    return found


def _plain(pattern: re.Pattern[str], name: str, letters: Mapping[str, int]) -> bool:  # noqa: ARG001  (as `_ends`)
    return pattern.match(name) is not None


def _ends(tree: Alternatives, name: str, letters: Mapping[str, int]) -> bool:
    """Whether the pattern takes the name from its start, or from behind a dot, to its end."""
    return bool(_after(tree, letters.get(".", 0) << 1 | 1, letters, 1 << len(name)) & 1 << len(name))


def _after(tree: Alternatives, start: int, letters: Mapping[str, int], end: int) -> int:
    """The places (as bits) behind a match that begins at one of the places `start`."""
    found = 0
    for sequence in tree:
        at = start
        for atom, many in sequence:
            if isinstance(atom, list):
                then = _after(atom, at, letters, end)
            elif atom in ("^", "$"):
                then = at & (1 if atom == "^" else end)
            else:
                mask = sum(places for letter, places in letters.items() if re.fullmatch(atom, letter))
                then = (at & mask) << 1
                while many in ("*", "+") and (more := then | (then & mask) << 1) != then:
                    then = more
            at = then | at if many in ("?", "*") else then
        found |= at
    return found
