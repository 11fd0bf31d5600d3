"""Facts of adapter pools come from the factors, and are those of the same pool as full checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lora_zoo import adapter_pool, merged
from stockpot import Pool
from stockpot.pool import lora
from stockpot.pool.facts import strangers_of


def layers() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 3), "e": nn.Embedding(9, 4)})


def zoo(folder: Path) -> Pool:
    each = [{"a": 2, "b": 2}, {"a": 3, "e": 1}, {"a": 2, "b": 1, "e": 2}, {"b": 4}]
    own = {2: {"dense": {"c.weight": torch.ones(3, 8)}}}
    return adapter_pool(folder, layers, each, embeddings=("e",), own=own)


def test_facts_are_those_of_the_merged_checkpoints(tmp_path: Path) -> None:
    pool = zoo(tmp_path)
    found, wanted = pool.facts(), merged(pool, tmp_path / "full").facts()
    assert found.frozen == wanted.frozen == {"a.bias", "b.bias", "c.bias"}
    assert (found.tied, found.duplicates, found.nonfinite) == (wanted.tied, wanted.duplicates, {})
    for name in ("pairs", "to_mean", "norms"):
        torch.testing.assert_close(
            getattr(found.distances, name), getattr(wanted.distances, name), rtol=1e-6, atol=1e-6, msg=name
        )


def test_inner_products_in_pieces_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = zoo(tmp_path).facts().distances.pairs
    monkeypatch.setattr("stockpot.pool.lora_scan.CELLS", 1)
    again = Pool.open(tmp_path / "adapters", base=tmp_path / "base.safetensors").facts().distances.pairs
    torch.testing.assert_close(again, whole)


def test_no_delta_is_made_for_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = zoo(tmp_path)
    made: list[str] = []
    plain = lora.Adapters.tensor
    monkeypatch.setattr(
        lora.Adapters,
        "tensor",
        lambda self, k, name: made.append(name) or plain(self, k, name),  # type: ignore[func-returns-value]
    )
    assert strangers_of(pool.checkpoints, pool.specs) == []  # adapters share their base
    assert made == []
    pool.facts()
    assert set(made) == {"c.weight"}  # which one of them holds as a full tensor


@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_factors_that_are_not_finite_or_overflow_are_named(tmp_path: Path, value: float) -> None:
    adapter_pool(tmp_path, layers, [{"a": 2}, {"a": 2}, {"a": 2}])
    file = tmp_path / "adapters" / "a1" / "adapter_model.safetensors"
    state = load_file(file)
    state["base_model.model.a.lora_B.weight"][0] = value
    state["base_model.model.a.lora_A.weight"][0] = value
    save_file(state, file)
    pool = Pool.open(tmp_path / "adapters", base=tmp_path / "base.safetensors")
    assert set(pool.facts().nonfinite) == {1}
    assert "others in 1 of its tensors: a.weight (" in pool.facts().nonfinite[1]
    assert pool.drop_nonfinite().names == ("a0", "a2")


def test_adapters_of_zeros_in_one_module_leave_it_frozen(tmp_path: Path) -> None:
    pool = adapter_pool(tmp_path, layers, [{"a": 2, "b": 2}, {"a": 2, "b": 2}])
    for file in sorted((tmp_path / "adapters").glob("*/adapter_model.safetensors")):
        save_file({n: v * (0 if ".b.lora_B" in n else 1) for n, v in load_file(file).items()}, file)
    pool = Pool.open(tmp_path / "adapters", base=tmp_path / "base.safetensors")
    assert "b.weight" in pool.facts().frozen
    assert "a.weight" not in pool.facts().frozen
