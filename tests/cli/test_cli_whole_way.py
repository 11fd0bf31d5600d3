"""From one model to a soup, by commands alone: a transformers classifier of random weights, and plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.conftest import Stockpot

BERT = """
model:
  transformers:
    {model_type: bert, vocab_size: 30, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
     intermediate_size: 32, max_position_embeddings: 8, num_labels: 3}
  auto_class: AutoModelForSequenceClassification
data: {arrays: tokens.npz, tokens: input_ids, label: label, train: 120, fit: 80, report: 100}
finetune: {trials: 3, epochs: [2, 3], lr: {min: 0.003, max: 0.01, scale: log}, probe_epochs: 2, batch_size: 32}
"""

PLAIN = """
model: {python: "net:net"}
data: {arrays: features.npz, train: 120, fit: 80, report: 100}
finetune: {trials: 3, epochs: [4, 6], lr: [0.01, 0.03], probe: false, batch_size: 32}
"""

REST = """
method:
  methods: [best, uniform, greedy, ensemble, learned, hl+, mehl+, crossfit]
  steps: 8
  each: {crossfit: {steps: 8}}
output: {dir: run}
"""


def prepare(folder: Path, kind: str) -> Path:
    random = np.random.default_rng(0)
    label = random.integers(0, 3, 300)
    tokens = random.integers(0, 30, (300, 8))
    tokens[:, :4] = 10 * label[:, None] + random.integers(0, 10, (300, 4))  # some words tell the class
    np.savez(folder / "tokens.npz", input_ids=tokens, label=label)
    x = random.normal(size=(300, 6)).astype(np.float32) + 1.2 * np.eye(3, 6, dtype=np.float32)[label]
    np.savez(folder / "features.npz", x=x, y=label)
    (folder / "net.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))\n"
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text((BERT if kind == "transformers" else PLAIN) + REST)
    return recipe


@pytest.mark.parametrize("kind", ["transformers", "plain"])
def test_finetune_inspect_compare_evaluate_rebuild(tmp_path: Path, stockpot: Stockpot, kind: str) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers")
    recipe = prepare(tmp_path, kind)
    made = stockpot("finetune", recipe)
    assert made.code == 0, made.err
    assert [name for name in ("trial_000", "trial_001", "trial_002") if name in made.out] == [
        "trial_000",
        "trial_001",
        "trial_002",
    ]
    checkpoints = {file.name: file.read_bytes() for file in (tmp_path / "pool").glob("*.safetensors")}
    assert len(checkpoints) == 3

    again = stockpot("finetune", recipe, "--json")
    assert "3 of 3 trials finished earlier" in again.err
    assert len(json.loads(again.out)) == 3
    more = stockpot("finetune", recipe, "--trials", "4")
    assert more.code == 0, more.err
    assert {n: (tmp_path / "pool" / n).read_bytes() for n in checkpoints} == checkpoints  # added to, not made again
    refused = stockpot("finetune", recipe, "--set", "finetune.batch_size=16")
    assert refused.code == 1
    assert "batch_size" in refused.err

    seen = json.loads(stockpot("inspect", recipe, "--json").out)
    assert [entry["name"] for entry in seen["ingredients"]] == [f"trial_00{k}" for k in range(4)]
    assert all(entry["trial"]["lr"] > 0 for entry in seen["ingredients"])

    compared = stockpot("compare", recipe)
    assert compared.code == 0, compared.err
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["failed"] == {}
    assert len(results["methods"]) == 8

    scored = json.loads(stockpot("evaluate", tmp_path / "run", recipe, "--json").out)
    slug = results["recommended"].replace("+", "-plus")
    recorded = json.loads((tmp_path / "run" / "methods" / slug / "result.json").read_text())
    assert scored["score"] == recorded["reports"]["report"]
    assert scored["score"]["value"] > 0.45  # three classes: chance is a third

    rebuilt = stockpot("rebuild", tmp_path / "run")
    assert rebuilt.code == 0, rebuilt.err
    assert "every byte is the same" in rebuilt.out


def test_finetune_needs_its_section(folder: Path, stockpot: Stockpot) -> None:
    answer = stockpot("finetune", folder / "recipe.yaml")
    assert answer.code == 1
    assert "finetune: required" in answer.err
