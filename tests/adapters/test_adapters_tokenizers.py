"""A folder without a tokenizer is no tokenizer: the library would make an empty one, for which every text is alike."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from stockpot.adapters.transformers import load
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
