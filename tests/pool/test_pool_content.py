"""Passes over the data: digests, facts, finite weights."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool_files import DTYPES, State, state, write, write_shards
from torch import Tensor

from stockpot.errors import PoolError
from stockpot.events import Event
from stockpot.pool import Pool, PoolFacts
from stockpot.pool.source import natural_key


def facts_of(tmp_path: Path, *states: State) -> PoolFacts:
    return Pool.open([write(tmp_path / f"{k}.pt", tensors) for k, tensors in enumerate(states)]).facts()


def test_the_digest_is_what_its_description_says(tmp_path: Path) -> None:
    tensors = {
        "a2": torch.tensor([1.0, -0.0]),
        "a10": torch.tensor(3),
        "é": torch.ones(0, 2, dtype=torch.bool),
    }
    paths = [write(tmp_path / name, tensors) for name in ("x.pt", "y.pt")]
    lines = [
        ["a10", "int64", [], hashlib.sha256((3).to_bytes(8, "little")).hexdigest()],
        ["a2", "float32", [2], hashlib.sha256(bytes.fromhex("0000803f00000080")).hexdigest()],
        ["é", "bool", [0, 2], hashlib.sha256(b"").hexdigest()],
    ]
    expected = hashlib.sha256("".join(json.dumps(line) + "\n" for line in lines).encode()).hexdigest()
    assert Pool.open(paths).digests() == (expected, expected)


def test_the_digest_does_not_depend_on_the_container(tmp_path: Path) -> None:
    tensors = {f"t.{k}": torch.ones(3).to(dtype) for k, dtype in enumerate(DTYPES)}
    nested = tmp_path / "d.ckpt"
    torch.save(
        {"state_dict": {f"module.{name}": tensor for name, tensor in reversed(tensors.items())}}, nested
    )
    sources = [
        write(tmp_path / "a.pt", tensors),
        write(tmp_path / "b.safetensors", tensors),
        write_shards(tmp_path / "c", tensors),
        write_shards(tmp_path / "e", tensors, ".bin"),
        nested,
    ]
    assert len(set(Pool.open(sources).digests())) == 1


def test_strides_do_not_change_the_digest_but_content_does(tmp_path: Path) -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    variants: list[Tensor] = [
        matrix,
        matrix.t().contiguous().t(),
        matrix.t(),
        matrix.flip(0),
        matrix.reshape(3, 2),
    ]
    paths = [write(tmp_path / f"{k}.pt", {"w": tensor}) for k, tensor in enumerate(variants)]
    same, transposed = Pool.open(paths[0], paths[1]).digests()
    assert same == transposed
    other = [
        Pool.open(path, write(tmp_path / "c" / path.name, torch.load(path))).digests()[0] for path in paths
    ]
    assert len({*other}) == 4, "two of the five are equal"


def test_facts_and_digests_read_each_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stockpot.pool.checkpoint import Checkpoint

    read: list[str] = []
    original = Checkpoint.tensor

    def counted(self: Checkpoint, name: str) -> Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(Checkpoint, "tensor", counted)
    pool = Pool.open([write(tmp_path / f"{k}.pt", state(k)) for k in range(3)])
    facts = pool.facts()
    assert sorted(read) == sorted([*state()] * 3)
    part = pool.subset([2, 0])
    assert part.digests() == (facts.digests[2], facts.digests[0])
    assert part.facts().digests == part.digests()
    assert pool.digests() == facts.digests
    assert pool.facts() is facts
    assert len(read) == 9, "everything after the first pass came from memory"


def test_frozen_and_duplicates(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, state(1), state(2), state(1), state(3), state(2))
    assert facts.frozen == {"layer.bias", "steps"}
    assert facts.duplicates == ((0, 2), (1, 4))
    assert facts.digests[0] == facts.digests[2] != facts.digests[1]


def test_frozen_is_bitwise_so_nan_equals_nan_and_zero_differs_from_minus_zero(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        {"nan": torch.tensor([float("nan")]), "zero": torch.tensor([0.0])},
        {"nan": torch.tensor([float("nan")]), "zero": torch.tensor([-0.0])},
    )
    assert facts.frozen == {"nan"}


def test_frozen_across_mixed_dtypes_compares_values(tmp_path: Path) -> None:
    for k, dtype in enumerate((torch.float32, torch.float16, torch.float32)):
        write(
            tmp_path / f"{k}.pt",
            {"exact": torch.tensor([0.5]).to(dtype), "rounded": torch.tensor([0.1]).to(dtype)},
        )
    assert Pool.open(tmp_path, mixed_dtypes=True).facts().frozen == {"exact"}


def test_tied_must_be_equal_in_every_ingredient(tmp_path: Path) -> None:
    def model(seed: int, tie_second: bool) -> State:
        first, second = torch.arange(3.0) + seed, torch.arange(4.0) - seed
        return {
            "a": first,
            "b": first.clone(),
            "c": second,
            "d": second.clone() if tie_second else second + 1,
            "e": first.reshape(3, 1).clone(),
            "f": first.view(torch.int32).clone(),
        }

    assert facts_of(tmp_path, model(1, True), model(2, False), model(3, True)).tied == (("a", "b"),)
    assert facts_of(tmp_path, model(1, True), model(2, True)).tied == (("a", "b"), ("c", "d"))


def test_equal_constants_are_not_tied_unless_the_file_says_so(tmp_path: Path) -> None:
    zeros, ones = torch.zeros(4), torch.ones(5)
    plain = {"a.bias": zeros, "b.bias": zeros.clone(), "n": torch.tensor(1), "m": torch.tensor(1), "w": ones}
    assert facts_of(tmp_path, plain, plain).tied == ()
    shared = {**plain, "b.bias": zeros, "v": ones, "u": ones.clone()}
    alone = {**{name: tensor.clone() for name, tensor in shared.items()}}
    assert facts_of(tmp_path, shared, alone).tied == (("a.bias", "b.bias"), ("v", "w"))


def test_constant_in_one_ingredient_is_not_constant_in_all(tmp_path: Path) -> None:
    fresh = {"a": torch.zeros(3), "b": torch.zeros(3)}
    trained = {"a": torch.arange(3.0), "b": torch.arange(3.0)}
    assert facts_of(tmp_path, fresh, trained).tied == (("a", "b"),)


def test_a_large_constant_with_one_difference_far_in_is_not_constant(tmp_path: Path) -> None:
    late = torch.zeros(2**20 + 7, dtype=torch.bfloat16)
    late[-1] = 1
    assert facts_of(tmp_path, {"a": late, "b": late.clone()}, {"a": late, "b": late.clone()}).tied == (
        ("a", "b"),
    )


def test_empty_tensors_are_frozen_but_never_tied(tmp_path: Path) -> None:
    empty = {"a": torch.ones(0), "b": torch.ones(0), "w": torch.ones(1)}
    facts = facts_of(tmp_path, empty, empty)
    assert facts.tied == ()
    assert facts.frozen == {"a", "b", "w"}


def test_progress_goes_from_nothing_to_all_bytes_in_a_bearable_number_of_events(tmp_path: Path) -> None:
    tensors = {f"t{k}": torch.ones(1) for k in range(600)}
    pool = Pool.open([write(tmp_path / f"{k}.safetensors", tensors) for k in range(2)])
    for work in (pool.subset([0, 1]).facts, pool.subset([0, 1]).digests, pool.verify_finite):
        events: list[Event] = []
        work(events.append)
        done = [event.data["done"] for event in events]
        assert (done[0], done[-1]) == (0, 4800)
        assert done == sorted(done)
        assert {(event.kind, event.data["what"], event.data["total"]) for event in events} == {
            ("progress", "hash", 4800)
        }
        assert len(events) <= 202


def test_not_finite_weights_are_named_by_file_and_tensor(tmp_path: Path) -> None:
    good = state()
    bad = {**state(), "layer.weight": torch.tensor([[float("nan"), float("inf"), -float("inf")]] * 4)}
    late = {**state(), "layer.bias": torch.tensor([1.0, 2.0, 3.0, float("inf")])}
    paths = [
        write(tmp_path / f"{name}.pt", tensors) for name, tensors in (("g", good), ("b", bad), ("l", late))
    ]
    pool = Pool.open(paths)
    with pytest.raises(PoolError) as caught:
        pool.verify_finite()
    text = str(caught.value)
    assert text.startswith("2 of 3 checkpoints have weights that are not finite\n")
    assert f"{paths[1]}: expected finite weights, found others in 1 of its tensors: layer.weight " in text
    assert "(4 NaN and 8 infinite of 12)" in text
    assert (
        f"{paths[2]}: expected finite weights, found others in 1 of its tensors: layer.bias (1 infinite of 4)"
        in text
    )
    assert "leave this checkpoint out of the pool" in text
    assert str(paths[0]) not in text
    pool.subset([0]).verify_finite()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64],
    ids=str,
)
def test_every_floating_dtype_is_checked_to_its_last_element(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float
) -> None:
    monkeypatch.setattr("stockpot.pool.scan.CHUNK", 8)  # four numbers of each
    clean = torch.ones(11).to(dtype)
    spoilt = torch.tensor([1.0] * 10 + [value]).to(dtype)
    pool = Pool.open([write(tmp_path / f"{k}.safetensors", {"w": t}) for k, t in enumerate((clean, spoilt))])
    with pytest.raises(PoolError, match="1 of 2 checkpoints"):
        pool.verify_finite()


def test_the_largest_finite_values_pass(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.full((9,), torch.finfo(dtype).max, dtype=dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    tensors["int"] = torch.full((9,), 2**62)
    Pool.open([write(tmp_path / f"{k}.pt", tensors) for k in range(2)]).verify_finite()


@given(st.lists(st.integers(0, 10**6), min_size=2, unique=True))
def test_numbers_in_names_sort_as_numbers(numbers: list[int]) -> None:
    names = [f"m_{number}.x" for number in numbers]
    assert sorted(names, key=natural_key) == [f"m_{number}.x" for number in sorted(numbers)]


@given(st.lists(st.text("a0 1.", max_size=5), min_size=3, max_size=3))
def test_natural_order_is_a_total_order(texts: list[str]) -> None:
    orders = {tuple(sorted(order, key=natural_key)) for order in itertools.permutations(texts)}
    assert len(orders) == 1


def test_leading_zeros_do_not_make_a_number_larger() -> None:
    assert sorted(["m_8", "m_007", "m_10", "m_09"], key=natural_key) == ["m_007", "m_8", "m_09", "m_10"]


def test_numbers_of_any_length_can_be_compared() -> None:
    assert natural_key("9" * 6000) > natural_key("8" * 6000)


def test_a_name_is_not_tied_to_itself(tmp_path: Path) -> None:
    """`a` and `c` are one tensor in the first file only; `a` and `b` are equal by initialisation."""
    zeros = torch.zeros(3)
    torch.save({"a": zeros, "b": torch.zeros(3), "c": zeros}, tmp_path / "0.pt")
    torch.save({"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.ones(3)}, tmp_path / "1.pt")
    assert Pool.open(tmp_path).facts().tied == ()


def test_nan_in_float8_is_counted(tmp_path: Path) -> None:
    for k in range(2):
        values = torch.tensor([float("nan"), 1.0, float(k)]).to(torch.float8_e4m3fn)
        write(tmp_path / f"{k}.safetensors", {"w": values})
    with pytest.raises(PoolError, match=r"w \(1 NaN of 3\)"):
        Pool.open(tmp_path).verify_finite()
