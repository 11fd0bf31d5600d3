"""Pre-trained weights in the form the recipes start from."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load, save_file

from convert.imdb import NAMES

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def efficientnet(read: Callable[[str], bytes], out: Path) -> None:
    """`out/pretrained.safetensors`: the published file is in torch's old format, which stockpot does not open."""
    out.mkdir(parents=True, exist_ok=True)
    weights = torch.load(io.BytesIO(read("efficientnet-lite0-57934424.pth")), weights_only=True)
    weights = {name: value.contiguous() for name, value in weights.items()}
    save_file(weights, out / "pretrained.safetensors", {"format": "pt"})


def minilm(read: Callable[[str], bytes], out: Path) -> None:
    """`out/model/`: the encoder with a fresh head for two classes, and its tokenizer."""
    folder = out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(read("config.json"))
    for name in ("_name_or_path", "transformers_version", "gradient_checkpointing"):
        config.pop(name, None)
    config["architectures"] = ["BertForSequenceClassification"]
    config["id2label"] = {str(number): name for number, name in enumerate(NAMES)}
    config["label2id"] = {name: number for number, name in enumerate(NAMES)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    encoder = load(read("model.safetensors"))
    weights = {f"bert.{name}": value for name, value in encoder.items() if not name.endswith("position_ids")}
    stream = torch.Generator().manual_seed(0)
    size = (len(NAMES), config["hidden_size"])
    weights["classifier.weight"] = config["initializer_range"] * torch.randn(size, generator=stream)
    weights["classifier.bias"] = torch.zeros(len(NAMES))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in TOKENIZER:
        (folder / name).write_bytes(read(name))
