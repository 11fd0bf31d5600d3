"""Models whose files have other names than they have in memory, as transformers does it from version 5 on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stockpot import Pool, Soup, Task, average, cook
from stockpot.errors import TaskError
from stockpot.names import file_names

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS: dict[str, Any] = {**SIZES, "vocab_size": 32, "max_position_embeddings": 16}


def vit() -> Any:
    config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def pythia() -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**WORDS))


def mixture() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**WORDS, num_local_experts=2, num_key_value_heads=1)
    )


def pool_of(folder: Path, build: Any) -> Pool:
    for k in range(3):
        torch.manual_seed(k)
        build().save_pretrained(folder / f"c{k}")
    return Pool.open(folder)


IDS = torch.randint(0, 32, (12, 6), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
DATA: dict[str, Any] = {
    "vit": (vit, {"pixel_values": PIXELS, "labels": torch.arange(12) % 3}, "accuracy"),
    "pythia": (pythia, {"input_ids": IDS, "labels": IDS}, "nats_per_token"),
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("method", ["greedy", "hl+"])
def test_their_soups_are_learned_and_load(kind: str, method: str, tmp_path: Path) -> None:
    build, data, metric = DATA[kind]
    pool, model = pool_of(tmp_path / "pool", build), build()
    assert file_names(model, pool.specs)  # else this tests nothing
    options: dict[str, Any] = {"steps": 4, "batch_size": 12} if method == "hl+" else {}
    result = cook(pool, Task(model, data, metric=metric), method, **options)
    assert result.soup is not None
    folder = result.soup.save(tmp_path / "soup")
    assert load_file(folder / "model.safetensors").keys() == set(pool.specs)
    inputs = {name: value for name, value in data.items() if name != "labels"}
    other, again = type(model).from_pretrained(folder).eval(), build()
    Task(again, data, metric=metric).load({name: result.soup.state_dict()[name] for name in pool.specs})
    logits = [one.eval()(**inputs).logits for one in (model, other, again)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    if method == "hl+":
        assert float((result.soup.W - 1 / 3).abs().max()) > 1e-3  # every tensor had its gradient
        assert bool((result.soup.W != 1 / 3).any(dim=0).all())


def test_a_pool_in_memory_has_the_models_own_names(tmp_path: Path) -> None:
    states = [tmp_path / f"{k}.pt" for k in range(2)]
    for k, path in enumerate(states):
        torch.manual_seed(k)
        torch.save(vit().state_dict(), path)
    pool, model = Pool.open(states), vit()
    assert file_names(model, pool.specs) == {}
    Soup.uniform(pool).load_into(model)
    torch.testing.assert_close(
        model.state_dict()["classifier.weight"],
        torch.stack([torch.load(path)["classifier.weight"] for path in states]).mean(dim=0),
    )


def test_experts_that_are_joined_in_memory_are_named(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, mixture)
    with pytest.raises(TaskError, match="transformers joins while it loads them, such as those of experts"):
        cook(pool, Task(mixture(), {"input_ids": IDS, "labels": IDS}, metric="nats_per_token"), "uniform")
    average(tmp_path / "*", tmp_path / "soup")  # as the text says
    soup = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "soup").state_dict()
    each = [transformers.MixtralForCausalLM.from_pretrained(tmp_path / f"c{k}").state_dict() for k in range(3)]
    for name, value in soup.items():
        torch.testing.assert_close(value, torch.stack([one[name] for one in each]).mean(dim=0))
