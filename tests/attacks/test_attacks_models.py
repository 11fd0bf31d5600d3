"""Model folders of strangers, as a recipe's `model.transformers` with the weights that `finetune` starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from attacks.kit import marker_in
from attacks.threats_pickles import code_in_a_key, slow_key
from stockpot.adapters.models import load_model
from stockpot.errors import StockpotError

CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 16,
}


def _folder(path: Path, **more: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, **more}))
    return path


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [code_in_a_key, slow_key])
def test_weights_are_looked_through_before_the_library_sees_them(make: Any, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model")
    make(tmp_path).rename(folder / "pytorch_model.bin")
    with pytest.raises(StockpotError, match=r"asks for posix\.system|too long to hash"):
        load_model("transformers", str(folder), folder=tmp_path, pretrained=True)


@pytest.mark.timeout(120)
def test_code_in_a_model_folder_is_not_run(tmp_path: Path) -> None:
    code = f"import pathlib\npathlib.Path({str(marker_in(tmp_path))!r}).touch()\nclass Evil: pass\n"
    names = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForSequenceClassification"), "evil.Evil")
    folder = _folder(tmp_path / "model", auto_map=names, attn_implementation="stranger/kernel")
    (folder / "evil.py").write_text(code)
    loaded = load_model("transformers", str(folder), folder=tmp_path)
    assert type(loaded.model).__name__ == "BertForSequenceClassification"


@pytest.mark.parametrize("content", ["[" * 100_000, '{"model_type": "bert", "model_type": "gpt2"}', "[]", "\0"])
def test_configurations_that_are_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(StockpotError, match=r"config\.json: expected"):
        load_model("transformers", str(tmp_path), folder=tmp_path)
