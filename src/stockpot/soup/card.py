"""The model card (README.md) of what was mixed: its ingredients, weights and how to load it, in the Hub's form.

The text depends on nothing but its arguments, so that a soup that is made again has the same card; that
`huggingface_hub.ModelCard` reads it is tested.
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
from stockpot.pool.hub import hub_id
from stockpot.pool.safetensors_files import open_safetensors
from stockpot.pool.source import is_directory
from stockpot.soup.heads import TASKS, labels

CARD = "README.md"
RESULTS = "## Results"
_HERE = "path/to/this"  # in a card: nobody knows where its folder will be
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SHOWN = 200  # ingredients listed at most


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
    lines = [
        "---",
        *_front_matter(data),
        "---",
        f"# {what.capitalize()}",
        "",
        f"{mixed} It costs what one of them costs.",
        "",
    ]
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
    name = _config(path).get("_name_or_path") if is_directory(path) else None
    return name if isinstance(name, str) and _is_hub_id(name) else None


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def library_of(folder: Path) -> str | None:
    """Whose loader takes this folder: transformers, timm, open_clip, peft, or nobody's."""
    if (folder / "adapter_config.json").is_file():
        return "peft"
    if (folder / "open_clip_config.json").is_file():
        return "open_clip"
    config = _config(folder)
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
    config = _config(folder, "adapter_config.json")
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
    names = _config(folder).get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    known = re.fullmatch(r"\w{1,80}", name)  # it becomes code
    lines = [f"model = transformers.{name if known else 'AutoModel'}.from_pretrained({where})"]
    if (folder / "preprocessor_config.json").is_file():
        lines.append(f"processor = transformers.AutoImageProcessor.from_pretrained({where})")
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        lines.append(f"tokenizer = transformers.AutoTokenizer.from_pretrained({where})")
    return lines


def _config(folder: Path, name: str = "config.json") -> Mapping[str, Any]:
    try:
        config = files.read_json(folder / name, follow=True)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _front_matter(data: Mapping[str, Any]) -> Iterable[str]:
    """JSON is YAML: whatever a name holds, it stays one value."""
    for key, value in data.items():
        if isinstance(value, list):
            yield f"{key}:"
            yield from (f"- {json.dumps(item)}" for item in value)
        else:
            yield f"{key}: {json.dumps(value)}"
