"""The card of a soup: what the Hub's own library reads in it, and that the lines it shows load the soup."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stockpot.layout import Layout
from stockpot.pool import Pool
from stockpot.pool.discover import hub_id
from stockpot.soup import Soup
from stockpot.soup.card import Ingredient, add_results, base_models, loading, write_card
from zoo import fine_tunes, mlp, write

hub = pytest.importorskip("huggingface_hub")


def test_the_hub_reads_the_card_of_a_saved_soup(tmp_path: Path) -> None:
    pool = write(tmp_path / "pool", fine_tunes(mlp, 3))
    W = torch.tensor([[0.2, 0.5], [0.3, 0.25], [0.5, 0.25]])
    layout = Layout.of(pool, lambda name: "weights" if name.endswith("weight") else "others")
    saved = Soup(pool, layout, W, about={"method": "by hand", "lr": 0.1}).save(tmp_path / "soup")
    card = hub.ModelCard.load(saved / "README.md")
    assert card.data.tags == ["merge", "model-soup"]
    assert card.data.base_model is None
    assert '"lr": 0.1' in card.text
    for name, digest in zip(pool.names, pool.digests(), strict=True):
        assert f"| {name.replace('_', chr(92) + '_')} | " in card.text
        assert f"`{digest[:16]}`" in card.text
    assert "| 0.35 (0.2 to 0.5) |" in card.text
    assert str(tmp_path) not in card.content


def test_names_of_strangers_stay_names(tmp_path: Path) -> None:
    odd = 'x | y\n---\n<img src="http://a">`![](b)'
    write_card(tmp_path, [Ingredient(odd, "1", "ab" * 32)], base_models=['a: [b]\n"c'], recipe={"```": "\n```\n# x"})
    card = hub.ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == ['a: [b]\n"c']
    assert card.data.base_model_relation == "merge"
    (row,) = [line for line in card.text.splitlines() if "img" in line]
    assert r"x \| y --- \<img src" in row
    assert not re.search(r"^# x", card.text, re.MULTILINE)


def test_results_are_put_in_and_replaced(tmp_path: Path) -> None:
    add_results(tmp_path, "| a |")  # a soup without a card stays without
    assert not (tmp_path / "README.md").exists()
    write_card(tmp_path, [Ingredient("one", "1", "ab" * 32)])
    before = (tmp_path / "README.md").read_text()
    add_results(tmp_path, "| first |")
    add_results(tmp_path, "| second |")
    assert (tmp_path / "README.md").read_text() == f"{before.rstrip()}\n\n## Results\n\n| second |\n"


def test_base_models_are_hub_ids_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    states = fine_tunes(mlp, 2)

    def pool(*starts: str) -> Pool:
        shutil.rmtree("pool", ignore_errors=True)
        for k, start in enumerate(starts):
            folder = Path("pool") / f"run_{k}"
            folder.mkdir(parents=True)
            save_file(states[k], folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps({"_name_or_path": start}))
        return Pool.open("pool")

    assert base_models(pool("org/base", "org/base")) == ["org/base"]
    assert base_models(pool("/home/me/base", "../base")) == []
    assert base_models(pool("pool/run_0", "C:\\base")) == []  # a folder here is no id
    assert base_models(pool("gpt2", "org/base")) == ["gpt2", "org/base"]
    assert hub_id(Path("hub/models--org--the-name/snapshots/0a1b")) == "org/the-name"


def state_of(lines: list[str], names: dict[str, Any]) -> dict[str, torch.Tensor]:
    exec("\n".join(lines), names)
    return dict(names["model"].state_dict())


@pytest.mark.parametrize("max_shard", ["5GB", 200])
def test_the_lines_load_a_plain_soup(tmp_path: Path, max_shard: int | str) -> None:
    soup = Soup.uniform(write(tmp_path / "pool", fine_tunes(mlp, 3)))
    saved = soup.save(tmp_path / "soup", max_shard=max_shard)
    found = state_of(loading(saved, str(saved)), {"model": mlp()})
    assert all(torch.equal(found[name], value) for name, value in soup.state_dict().items())


def test_the_lines_load_a_transformers_soup(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    for k in range(2):
        transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / f"run_{k}")
    saved = Soup.uniform(Pool.open(str(tmp_path / "run_*"))).save(tmp_path / "soup")
    lines = loading(saved, str(saved))
    assert len([line for line in lines if line]) <= 3
    assert "BertForSequenceClassification" in lines[2]
    found = state_of(lines, {})
    assert torch.equal(found["classifier.bias"], Soup.load(saved).state_dict()["classifier.bias"])
    assert hub.ModelCard.load(saved / "README.md").data.library_name == "transformers"
