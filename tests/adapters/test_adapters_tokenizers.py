"""A folder without a tokenizer is no tokenizer: the library would make an empty one, for which every text is alike."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from stockpot.adapters.huggingface import load
from stockpot.errors import TaskError


@pytest.mark.timeout(60)
@pytest.mark.parametrize("planted", [None, "tokenizer.json", "tokenizer_config.json", "vocab.txt"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, planted: str | None) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if planted is not None and sys.platform != "win32":
        os.mkfifo(tmp_path / planted)  # nothing waits for it
    model = load(tmp_path, auto_class=None, tokenizer=None, classes=None, options={}, pretrained=False)
    assert model.tokenizer is not None
    with pytest.raises(TaskError, match="expected the files of a tokenizer, found none"):
        model.tokenizer()


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"model_type": "roberta", "max_position_embeddings": 16, "pad_token_id": 1}, 14),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 16, "pad_token_id": 1}, 14),
        ({"model_type": "mpnet", "max_position_embeddings": 16, "pad_token_id": 1}, 14),
        ({"model_type": "bert", "max_position_embeddings": 16, "pad_token_id": 0}, 16),
        ({"model_type": "distilbert", "max_position_embeddings": 16, "dim": 8, "n_heads": 1, "n_layers": 1}, 16),
    ],
)
def test_a_models_context_is_what_it_can_be_called_with(config: dict[str, object], context: int) -> None:
    """RoBERTa's positions begin behind that of padding: the configuration says two more than texts may have."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    kinds = {
        "roberta": "Roberta",
        "xlm-roberta": "XLMRoberta",
        "mpnet": "MPNet",
        "bert": "Bert",
        "distilbert": "DistilBert",
    }
    auto = f"{kinds[str(config['model_type'])]}Model"
    loaded = load({**sizes, "vocab_size": 30, **config}, auto_class=auto, tokenizer=None, classes=None, options={},
                  pretrained=False)  # fmt: skip
    assert loaded.max_length == context
    with torch.no_grad():
        loaded.model(input_ids=torch.full((1, context), 5))
        with pytest.raises((IndexError, RuntimeError)):
            loaded.model(input_ids=torch.full((1, context + 1), 5))
