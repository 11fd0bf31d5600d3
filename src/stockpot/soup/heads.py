"""What adapters were trained as: the class of their model and the size of its head, by which loaders go.

Their base's configuration says what the base was. A soup that is a full model needs its own, and a reader of an adapter
the class that loads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stockpot import files
from stockpot.pool import TensorSpec
from stockpot.pool.lora import Adapters

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


def labels(task: Any, whole: Iterable[TensorSpec]) -> int | None:
    """How many classes a classifier has, by the tensors that its adapter holds whole: the head's last layer is the
    narrowest of them."""
    sizes = [spec.shape[0] for spec in whole if len(spec.shape) == 2]
    return min(sizes) if sizes and task in ("SEQ_CLS", "TOKEN_CLS") else None


def restate(folder: Path, adapters: Adapters) -> None:
    """Let the base's config in this folder name the adapters' model, so that the soup loads as that."""
    one = adapters.each[0]
    task, mapping = one.config.get("task_type"), one.config.get("auto_mapping")
    try:
        config = files.read_json(folder / "config.json")
    except (OSError, ValueError):
        return
    if not isinstance(config, dict):
        return
    changed, names = dict(config), config.get("architectures")
    given = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    if isinstance(given, str) and re.fullmatch(r"\w{1,80}", given):
        changed["architectures"] = [given]
    elif task in _HEADS and isinstance(names, list) and names and isinstance(names[0], str):
        family = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", names[0])
        changed["architectures"] = [f"{family}For{TASKS[task]}"]
    count = labels(task, (one.file.specs[key] for key in one.dense.values()))
    if count is not None and len(config.get("id2label") or "ab") != count:  # without names there are two
        changed["id2label"] = {str(n): f"LABEL_{n}" for n in range(count)}
        changed["label2id"] = {f"LABEL_{n}": n for n in range(count)}
    if changed != config:
        (folder / "config.json").write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", "utf-8")
