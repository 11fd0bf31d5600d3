"""docs/adapters.md as it stands: its recipe, its Python, and the commands on a pool of adapters."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.conftest import Stockpot
from stockpot import Pool
from stockpot.events import ignore
from stockpot.pool import open_checkpoint
from stockpot.pool.scan import scan

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bare encoder with a tokenizer, and classifiers made of it by LoRA."""
    monkeypatch.chdir(tmp_path)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=len(WORDS),
        max_position_embeddings=20, num_labels=3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    model.bert.save_pretrained("base")
    Path("vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast("vocab.txt").save_pretrained("base")
    for i in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fresh = transformers.BertForSequenceClassification.from_pretrained("base", num_labels=3)
            settings = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
            made = peft.get_peft_model(fresh, settings)
        torch.manual_seed(i)
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.2)
        made.save_pretrained(f"adapters/a{i}")
    lines = [f"w{i} w{i * 7 % 40},{'abc'[i % 3]}" for i in range(36)]
    Path("reviews.csv").write_text("\n".join(["text,label", *lines]))
    Path("recipe.yaml").write_text("\n".join(re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)))
    return tmp_path


def test_the_recipe_of_the_page_cooks_an_adapter_that_evaluates_and_rebuilds(folder: Path, stockpot: Stockpot) -> None:
    quick = ("--set", "method.steps=4", "--set", "method.name=hl+")
    cooked = stockpot("cook", "recipe.yaml", *quick)
    assert cooked.code == 0, cooked.err
    assert "the soup is written as an exact adapter of rank 6; serve it with a rank of 8" in cooked.out
    soup = folder / "run" / "methods" / "hl-plus" / "soup"
    assert (soup / "adapter_model.safetensors").is_file()
    assert not (soup / "model.safetensors").exists()
    assert (soup / "tokenizer_config.json").is_file()
    scored = [stockpot("evaluate", where, "recipe.yaml", "--json") for where in ("run", soup)]
    values = [json.loads(one.out)["score"]["value"] for one in scored]
    (report,) = json.loads((soup.parent / "result.json").read_text())["reports"].values()
    assert values == [report["value"]] * 2
    again = stockpot("rebuild", "run")
    assert "every byte is the same" in again.out, again.err
    record = json.loads((soup / "soup.json").read_text())
    assert record["form"] == "adapter"
    assert record["opened_with"]["base"] == str(folder / "base")
    base = open_checkpoint(folder / "base", rename=lambda name: f"bert.{name}")  # as the adapters name it
    digest = scan([base], base.specs, ignore, hashes_only=True).digests[0]
    assert json.loads(Path("run", "pool.json").read_text())["base"] == {"path": str(folder / "base"), "digest": digest}
    assert stockpot("evaluate", "adapters/a0", "recipe.yaml").code == 0
    # Another form is another run.
    refused = stockpot("cook", "recipe.yaml", *quick, "--as", "merged")
    assert refused.code == 1
    assert "output.form" in refused.err
    small = stockpot("cook", "recipe.yaml", *quick, "--as", "2", "--out", "small")
    assert "the soup is written as an adapter of rank at most 2 (exact: 6); relative error of its deltas" in small.out
    assert "; serve it with a rank of 8" in small.out
    state = load_file(folder / "small" / "methods" / "hl-plus" / "soup" / "adapter_model.safetensors")
    assert {len(value) for name, value in state.items() if "lora_A" in name} == {2}


def test_the_python_of_the_page_runs(folder: Path) -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(block, names)
    errors = names["errors"]
    assert isinstance(errors, dict)
    assert len(errors) == 4
    assert all(0 < error < 1 for error in errors.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = transformers.BertForSequenceClassification.from_pretrained("base", num_labels=3)
        assert peft.PeftModel.from_pretrained(base, "small").peft_config["default"].r == 2


def test_inspect_shows_rank_scale_norm_and_cosine_of_deltas(folder: Path, stockpot: Stockpot) -> None:
    shutil.copytree("adapters/a0", "adapters/a9")
    answer = stockpot("inspect", "recipe.yaml")
    assert answer.code == 0, answer.err
    assert "LoRA adapters on base" in answer.out
    assert "The pool fits the recipe's model" in answer.out
    assert "duplicates: a0, a9 have the same content" in answer.out
    row = next(line for line in answer.out.splitlines() if line.split()[:1] == ["a0"])
    assert row.split()[:3] == ["a0", "2", "4"]
    assert "a9 (1.00)" in row
    assert row.endswith("query, value and 2 whole tensors")
    found = json.loads(stockpot("inspect", "adapters/*", "--base", "base", "--json").out)
    pool = Pool.open("adapters/*", base="base")
    assert pool.adapters is not None
    deltas = [
        torch.cat([pool.adapters.delta(k, name, torch.float64).flatten() for name in sorted(one.factors)])
        for k, one in enumerate(pool.adapters.each)
    ]
    for k, entry in enumerate(found["ingredients"]):
        assert entry["adapter"]["norm"] == pytest.approx(float(deltas[k].norm()), rel=1e-5)
        assert (entry["adapter"]["ranks"], entry["adapter"]["scales"]) == ([2], [4.0])
        for i in range(4):
            cosine = float(torch.nn.functional.cosine_similarity(deltas[k], deltas[i], dim=0))
            assert found["cosines"][k][i] == pytest.approx(cosine, abs=1e-5)


def test_inspect_says_which_adapters_a_soup_could_not_take_and_why(folder: Path, stockpot: Stockpot) -> None:
    changes: dict[str, dict[str, object]] = {"dora": {"use_dora": True}, "late": {"revision": "v2"}}
    for name, change in changes.items():
        shutil.copytree("adapters/a0", f"adapters/{name}")
        config = Path("adapters", name, "adapter_config.json")
        config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    shutil.copytree("base", "adapters/full")
    answer = stockpot("inspect", "adapters/*", "--base", "base")
    assert answer.code == 1
    assert {"a0", "a1", "a2"} <= {line.split()[0] for line in answer.out.splitlines() if line.strip()}
    problems = [line for line in answer.out.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 3
    assert "dora: expected an adapter that adds s B A to its base, found DoRA" in problems[0]
    assert "late: expected an adapter of 'base' at 'main', as most are, found 'base' at 'v2'" in problems[1]
    assert "full: expected a LoRA adapter, as the others are, found a full checkpoint" in problems[2]
