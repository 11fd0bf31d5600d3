"""What a soup's folder says of itself: to loaders in config.json, to people in the model card (README.md).

The card has the Hub's form, and names ingredients, weights and how to load the soup. It depends on nothing but its
arguments, so that a soup that is made again has the same card; that `huggingface_hub.ModelCard` reads it is tested.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from stockpot import files, words
from stockpot._version import __version__
from stockpot.errors import CheckpointError
from stockpot.pool import Pool, TensorSpec
from stockpot.pool.checkpoint import open_safetensors
from stockpot.pool.discover import hub_id
from stockpot.pool.lora import Adapters
from stockpot.pool.peft_folders import Adapter
from stockpot.pool.source import dtype_name

CARD = "README.md"
RESULTS = "## Results"
_HERE = "path/to/this"  # in a card: nobody knows where its folder will be
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SHOWN = 200  # ingredients listed at most
# PEFT's names of tasks, and the end of the name of PEFT's class and, mostly, of the model's.
TASKS = {
    "SEQ_CLS": "SequenceClassification",
    "TOKEN_CLS": "TokenClassification",
    "QUESTION_ANS": "QuestionAnswering",
    "CAUSAL_LM": "CausalLM",
    "SEQ_2_SEQ_LM": "Seq2SeqLM",
    "FEATURE_EXTRACTION": "FeatureExtraction",
}
_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  # tasks that put another head on a base


@dataclass(frozen=True)
class Ingredient:
    """One row of a card's table."""

    name: str
    weight: str
    digest: str  # SHA-256


def write_card(
    folder: Path,
    ingredients: Sequence[Ingredient],
    *,
    base_models: Sequence[str] = (),
    relation: str = "merge",
    what: str = "model soup",
    recipe: Mapping[str, Any] | None = None,
    root: Path | None = None,
) -> None:
    """README.md of a folder that is complete but for it. `relation`: what it is to its base models, as the Hub says."""
    library = library_of(folder)
    data: dict[str, Any] = {}
    if base_models:
        data |= {"base_model": list(base_models), "base_model_relation": relation}
    data |= {"library_name": library} if library else {}
    data["tags"] = ["merge", "model-soup"]
    mixed = f"This {what} was mixed in weight space from {len(ingredients)} models by stockpot {__version__}."
    lines = ["---", *_front_matter(data), "---", f"# {what.capitalize()}", ""]
    lines += [f"{mixed} It costs what one of them costs.", ""]
    lines += ["## Use", "", "```python", *loading(folder, _HERE), "```", ""]
    if recipe:
        lines += ["## Recipe", "", "```json", *json.dumps(dict(recipe), indent=2, default=str).splitlines(), "```", ""]
    lines += ["## Ingredients", "", "| ingredient | weight | SHA-256 of its tensors |", "|---|---:|---|"]
    lines += [f"| {words.escaped(one.name)} | {one.weight} | `{one.digest[:16]}` |" for one in ingredients[:_SHOWN]]
    more = len(ingredients) - _SHOWN
    lines += ["", f"And {more} more."] if more > 0 else []
    files.write_bytes(folder / CARD, ("\n".join(lines) + "\n").encode("utf-8", "replace"), root)


def add_results(folder: Path, table: str, root: Path | None = None) -> None:
    """Put a Markdown table of scores into a card, in place of an earlier one."""
    try:
        text = files.read_text(folder / CARD, root=root)
    except (OSError, ValueError):
        return  # a soup of an earlier version has none
    text = text.split(f"\n{RESULTS}\n")[0].rstrip()
    files.write_bytes(folder / CARD, f"{text}\n\n{RESULTS}\n\n{table.strip()}\n".encode(), root)


def ingredients_of(pool: Pool, W: Tensor) -> list[Ingredient]:
    """Names, weights W (K, G) as text, and digests."""
    means, low, high = W.mean(dim=1).tolist(), W.amin(dim=1).tolist(), W.amax(dim=1).tolist()
    texts = [
        f"{mean:.4g}" if least == most else f"{mean:.4g} ({least:.4g} to {most:.4g})"
        for mean, least, most in zip(means, low, high, strict=True)
    ]
    return [Ingredient(*row) for row in zip(pool.names, texts, pool.digests(), strict=True)]


def base_models(pool: Pool) -> list[str]:
    """Hub ids: of the ingredients where they come from the Hub, else of what their configs say they began as."""
    paths = [checkpoint.path for checkpoint in pool.checkpoints]
    if pool.adapters is not None:
        if _is_hub_id(named := pool.adapters.each[0].base[0]):
            return [named]
        paths = [pool.adapters.base.path]
    return list(dict.fromkeys(found for path in paths if (found := hub_id(path) or _began_as(path))))


def _began_as(path: Path) -> str | None:
    name = files.read_table(path / "config.json").get("_name_or_path")
    return name if isinstance(name, str) and _is_hub_id(name) else None


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def library_of(folder: Path) -> str | None:
    """Whose loader takes this folder: transformers, timm, open_clip, peft, or nobody's."""
    if (folder / "adapter_config.json").is_file():
        return "peft"
    if (folder / "open_clip_config.json").is_file():
        return "open_clip"
    config = files.read_table(folder / "config.json")
    if "pretrained_cfg" in config:
        return "timm"
    return "transformers" if "model_type" in config or "architectures" in config else None


def loading(folder: Path, place: str) -> list[str]:
    """The lines of Python that load what is in a folder, which the reader has at `place`."""
    library, where = library_of(folder), json.dumps(place)
    if library == "peft":
        return _peft(folder, where)
    if library == "timm":
        return ["import timm", "", f"model = timm.create_model({json.dumps(f'local-dir:{place}')}, pretrained=True)"]
    if library == "transformers":
        return ["import transformers", "", *_transformers(folder, where)]
    if (folder / "model.safetensors").is_file():
        lines = ["from safetensors.torch import load_file", "", "# into a model that is built as for training:"]
        return [*lines, f"model.load_state_dict(load_file({json.dumps(f'{place}/model.safetensors')}))"]
    lines = ["import stockpot", "", f"soup = stockpot.pool.open_checkpoint({where})"]
    return [*lines, "model.load_state_dict({name: soup.tensor(name) for name in soup.specs})"]


def _peft(folder: Path, where: str) -> list[str]:
    config = files.read_table(folder / "adapter_config.json")
    task = config.get("task_type")
    if task not in TASKS and not config.get("auto_mapping"):
        note = "# into the model that the adapters were trained on, built as for training:"
        return ["from peft import PeftModel", "", note, f"model = PeftModel.from_pretrained(base, {where})"]
    specs: Mapping[str, TensorSpec] = {}
    with contextlib.suppress(CheckpointError):
        specs = open_safetensors(folder / "adapter_model.safetensors").specs
    count = labels(task, (spec for name, spec in specs.items() if "lora_" not in name))
    more = "" if count is None else f", num_labels={count}"
    kind = f"AutoPeftModelFor{TASKS[task]}" if task in TASKS else "AutoPeftModel"
    return [f"from peft import {kind}", "", f"model = {kind}.from_pretrained({where}{more})"]


def _transformers(folder: Path, where: str) -> list[str]:
    names = files.read_table(folder / "config.json").get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    known = re.fullmatch(r"\w{1,80}", name)  # it becomes code
    lines = [f"model = transformers.{name if known else 'AutoModel'}.from_pretrained({where})"]
    if (folder / "preprocessor_config.json").is_file():
        lines.append(f"processor = transformers.AutoImageProcessor.from_pretrained({where})")
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        lines.append(f"tokenizer = transformers.AutoTokenizer.from_pretrained({where})")
    return lines


def _front_matter(data: Mapping[str, Any]) -> Iterable[str]:
    """JSON is YAML: whatever a name holds, it stays one value."""
    for key, value in data.items():
        if isinstance(value, list):
            yield f"{key}:"
            yield from (f"- {json.dumps(item)}" for item in value)
        else:
            yield f"{key}: {json.dumps(value)}"


# ---- config.json


def labels(task: Any, whole: Iterable[TensorSpec]) -> int | None:
    """How many classes a classifier has, by the tensors that its adapter holds whole: the head's last layer is the
    narrowest of them."""
    sizes = [spec.shape[0] for spec in whole if len(spec.shape) == 2]
    return min(sizes) if sizes and task in ("SEQ_CLS", "TOKEN_CLS") else None


def restate(
    folder: Path, own: Mapping[str, TensorSpec], stored: Mapping[str, TensorSpec], adapters: Adapters | None
) -> None:
    """Let a config of the ingredients' name what the soup is, for loaders go by it: the type it is stored in, and of
    merged adapters the class of their model and the size of its head, where the base's config says what the base was.
    """
    config = files.read_table(folder / "config.json")
    changed = dict(config)
    was, now = ({one.dtype for one in specs.values() if one.dtype.is_floating_point} for specs in (own, stored))
    if len(was) == 1 and len(now) == 1:
        changed = _with_dtype(changed, dtype_name(*was), dtype_name(*now))
    if adapters is not None and config:
        changed |= _with_head(changed, adapters.each[0])
    if changed != config:
        (folder / "config.json").write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _with_dtype(config: Any, old: str, new: str) -> Any:
    if not isinstance(config, dict):
        return config
    found = {key: _with_dtype(one, old, new) for key, one in config.items()}
    return found | {key: new for key in ("dtype", "torch_dtype") if found.get(key) == old}


def _with_head(config: Mapping[str, Any], adapter: Adapter) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    task, mapping, names = (
        adapter.config.get("task_type"),
        adapter.config.get("auto_mapping"),
        config.get("architectures"),
    )
    given = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    if isinstance(given, str) and re.fullmatch(r"\w{1,80}", given):
        changed["architectures"] = [given]
    elif task in _HEADS and isinstance(names, list) and names and isinstance(names[0], str):
        family = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", names[0])
        changed["architectures"] = [f"{family}For{TASKS[task]}"]
    count = labels(task, (adapter.file.specs[key] for key in adapter.dense.values()))
    if count is not None and len(config.get("id2label") or "ab") != count:  # without names there are two
        changed["id2label"] = {str(n): f"LABEL_{n}" for n in range(count)}
        changed["label2id"] = {f"LABEL_{n}": n for n in range(count)}
    return changed
