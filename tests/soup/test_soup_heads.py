"""Adapters with a head of their own, on a base with another: their soups load by the code that is shown for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stockpot import Pool, Soup, Task, cook
from stockpot.errors import SoupError
from stockpot.soup import rebuild
from stockpot.soup.card import loading

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

SIZES: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "max_position_embeddings": 16,
}  # fmt: skip
IDS = torch.arange(24).view(4, 6) + 3


def adapters(home: Path, base: Any, build: Callable[[str], Any], task: str, targets: list[str]) -> Pool:
    base.save_pretrained(home / "base")
    for k in range(3):
        torch.manual_seed(0)
        model = build(str(home / "base"))
        made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, task_type=task))
        torch.manual_seed(k)
        for name, parameter in made.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.data.normal_()
        made.save_pretrained(home / "adapters" / f"a{k}")
    return Pool.open(home / "adapters", base=home / "base")


def classifiers(home: Path) -> tuple[Pool, Any]:
    """On a base as bert-base-uncased is published, with the heads of its pre-training."""
    base = transformers.BertForPreTraining(transformers.BertConfig(**SIZES))
    auto = transformers.AutoModelForSequenceClassification
    pool = adapters(home, base, lambda name: auto.from_pretrained(name, num_labels=3), "SEQ_CLS", ["query", "value"])
    return pool, transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=3))


def loaded(folder: Path) -> Any:
    """The model that the lines of the card load."""
    names: dict[str, Any] = {}
    exec("\n".join(loading(folder, str(folder))), names)
    return names["model"].eval()


def test_a_base_with_another_head_gives_soups_that_load(tmp_path: Path) -> None:
    pool, model = classifiers(tmp_path)
    result = cook(pool, Task(model, {"input_ids": IDS, "labels": torch.arange(4) % 3}), "uniform")
    assert result.soup is not None
    assert any("left out is what the base has, the model lacks and no adapter changes: cls." in n for n in result.notes)
    wanted = model.eval()(input_ids=IDS).logits
    forms: list[Any] = ["adapter", 6, "merged"]
    for form in forms:
        folder = result.soup.save(tmp_path / f"soup-{form}", form=form)
        found = loaded(folder)
        assert "SequenceClassification" in type(found).__name__
        torch.testing.assert_close(found(input_ids=IDS).logits, wanted, rtol=1e-4, atol=1e-4)
    merged = load_file(tmp_path / "soup-merged" / "model.safetensors")
    assert merged.keys() == {name for name in pool.specs if not name.startswith("cls.")}
    rebuild(tmp_path / "soup-merged", tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "soup-merged" / "config.json").read_bytes()
    record = json.loads((tmp_path / "again" / "soup.json").read_text())
    record["layout"]["kept"]["classifier.weight"] = "absent"
    del record["layout"]["group_of"]["classifier.weight"]
    (tmp_path / "again" / "soup.json").write_text(json.dumps(record))
    with pytest.raises(SoupError, match="tensors that are left out, although ingredients change them"):
        Soup.load(tmp_path / "again")


def test_tags_on_a_base_whose_pooling_they_do_not_use(tmp_path: Path) -> None:
    base = transformers.BertModel(transformers.BertConfig(**SIZES))
    auto = transformers.AutoModelForTokenClassification
    pool = adapters(tmp_path, base, lambda name: auto.from_pretrained(name, num_labels=5), "TOKEN_CLS", ["query"])
    model = transformers.BertForTokenClassification(transformers.BertConfig(**SIZES, num_labels=5))
    labels = torch.arange(24).view(4, 6) % 5
    result = cook(pool, Task(model, {"input_ids": IDS, "labels": labels}, metric="token_accuracy"), "uniform")
    assert result.soup is not None
    found = loaded(result.soup.save(tmp_path / "soup", form="merged"))
    torch.testing.assert_close(found(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_language_model_keeps_the_configuration_of_its_base(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    build = transformers.AutoModelForCausalLM.from_pretrained
    pool = adapters(tmp_path, transformers.LlamaForCausalLM(config), build, "CAUSAL_LM", ["q_proj", "v_proj"])
    soup = Soup.uniform(pool)
    logits = [loaded(soup.save(tmp_path / form, form=form))(input_ids=IDS).logits for form in ("adapter", "merged")]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    before, after = ((tmp_path / name / "config.json").read_bytes() for name in ("base", "merged"))
    assert before == after


def test_a_model_of_ones_own_is_loaded_into(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "task_type": null}')
    lines = loading(tmp_path, "here")
    assert re.search(r"PeftModel.from_pretrained\(base, \"here\"\)", "\n".join(lines))
