"""Claims about Hugging Face models: trials are folders that the library loads, and text is augmented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stockpot.pool import Pool
from stockpot.zoo.plan import Plan, Probe, Trial
from stockpot.zoo.search import finetune

transformers = pytest.importorskip("transformers")


def test_trials_are_folders_that_the_library_loads(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        num_labels=3,
    )
    source = tmp_path / "source"
    source.mkdir()
    # The folder it came from had another head, and a tokenizer.
    (source / "config.json").write_text(json.dumps({**config.to_dict(), "num_labels": 7}))
    (source / "vocab.txt").write_text("[PAD]\n")
    (source / "weights.bin").write_bytes(b"not to be copied")
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(1, 40, (24, 8))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 3}
    plan = Plan(
        tuple(Trial(lr=lr, epochs=1, augmentation=0.5, label_smoothing=0.1) for lr in (1e-3, 2e-3)),
        batch_size=8,
        probe=Probe(epochs=1),
        head="classifier",
    )
    records = finetune(model, data, data, tmp_path / "pool", plan, as_directories=True, companions=source)
    assert [record.path for record in records] == [tmp_path / "pool" / f"trial_00{n}" for n in (0, 1)]
    files = {path.name for path in (tmp_path / "pool" / "trial_000").iterdir()}
    assert files == {"model.safetensors", "config.json", "vocab.txt"}
    pool = Pool.open(tmp_path / "pool")
    assert pool.names == ("trial_000", "trial_001")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(records[1].path)
    assert loaded.config.num_labels == 3
    assert torch.equal(loaded.classifier.weight, pool.tensor(1, "classifier.weight"))
    assert finetune(model, data, data, tmp_path / "pool", plan, as_directories=True) == records
