"""One pass over the data: digests, what is frozen, tied or not finite, distances."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool_files import DTYPES, State, state, write, write_shards
from torch import Tensor

from stockpot.errors import PoolError
from stockpot.events import Event
from stockpot.layout import Layout
from stockpot.pool import Checkpoint, Distances, Pool, PoolFacts, open_checkpoint, verify_finite
from stockpot.pool.facts import strangers_of
from stockpot.pool.source import natural_key


def facts_of(tmp_path: Path, *states: State) -> PoolFacts:
    return Pool.open([write(tmp_path / f"{k}.pt", tensors) for k, tensors in enumerate(states)]).facts()


def test_the_digest_is_what_its_description_says(tmp_path: Path) -> None:
    tensors = {"a2": torch.tensor([1.0, -0.0]), "a10": torch.tensor(3), "é": torch.ones(0, 2, dtype=torch.bool)}
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
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in reversed(tensors.items())}}, nested)
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
    variants: list[Tensor] = [matrix, matrix.t().contiguous().t(), matrix.t(), matrix.flip(0), matrix.reshape(3, 2)]
    paths = [write(tmp_path / f"{k}.pt", {"w": tensor}) for k, tensor in enumerate(variants)]
    same, transposed = Pool.open(paths[0], paths[1]).digests()
    assert same == transposed
    other = [Pool.open(path, write(tmp_path / "c" / path.name, torch.load(path))).digests()[0] for path in paths]
    assert len({*other}) == 4, "two of the five are equal"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How often each tensor of each file is read."""
    counts: Counter[tuple[str, str]] = Counter()
    original = Checkpoint.tensor

    def counted(self: Checkpoint, name: str) -> Tensor:
        counts[self.path.name, name] += 1
        return original(self, name)

    monkeypatch.setattr(Checkpoint, "tensor", counted)
    return counts


@pytest.mark.parametrize("first", ["facts", "verify_finite", "drop_nonfinite"])
def test_everything_that_is_asked_of_a_pool_takes_one_pass(
    tmp_path: Path, reads: Counter[tuple[str, str]], first: str
) -> None:
    pool = Pool.open([write(tmp_path / f"{k}.pt", state(k)) for k in range(3)])
    getattr(pool, first)()
    facts = pool.facts()
    pool.verify_finite()
    assert pool.drop_nonfinite() is pool
    assert facts.distances.outlier() is None
    assert pool.digests() == facts.digests
    assert pool.facts() is facts
    part = pool.subset([2, 0])
    assert part.digests() == part.facts().digests == (facts.digests[2], facts.digests[0])
    assert reads == Counter({(f"{k}.pt", name): 1 for k in range(3) for name in state()})


def test_a_pool_without_its_bad_ingredients_is_not_read_again(tmp_path: Path, reads: Counter[tuple[str, str]]) -> None:
    states = [state(k) for k in range(4)]
    states[1]["layer.weight"][0, 0] = float("nan")
    states[2]["layer.weight"][3, 2] = float("inf")
    pool = Pool.open([write(tmp_path / f"{k}.pt", tensors) for k, tensors in enumerate(states)])
    whole = pool.facts()
    assert set(whole.nonfinite) == {1, 2}
    found = pool.drop_nonfinite().facts().distances
    assert set(reads.values()) == {1}
    alone = Pool.open(tmp_path / "0.pt", tmp_path / "3.pt").facts().distances
    for name in ("pairs", "to_mean", "norms"):
        torch.testing.assert_close(getattr(found, name), getattr(alone, name), rtol=1e-12, atol=1e-12)
    assert float(whole.distances.pairs[0, 3]) == pytest.approx(float(found.pairs[0, 1]), rel=1e-12)


def test_blocks_chunks_and_threads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    for k in range(3):
        weight = torch.randn(30, 40, generator=generator)
        tensors = {"w": weight, "turned": torch.randn(40, 30, generator=generator).t(), "same": torch.arange(999.0)}
        torch.save({**tensors, "one": torch.randn(1, 70, generator=generator).t()}, tmp_path / f"{k}.pt")
    whole = Pool.open(tmp_path).facts()
    expected = [hashlib.sha256(torch.load(tmp_path / "0.pt")["turned"].contiguous().numpy()).hexdigest()]
    assert [Pool.open(tmp_path).scanned(lambda event: None).tensors["turned"].stored[0]] == expected
    for block, chunk, inline in ((1, 1, 0), (100, 7, 0), (1000, 64, 1 << 20), (1 << 20, 10, 0)):
        for name, value in (("BLOCK", block), ("CHUNK", chunk), ("_INLINE", inline), ("_WAITING", 1)):
            monkeypatch.setattr(f"stockpot.pool.scan.{name}", value)
        facts = Pool.open(tmp_path).facts()
        assert (facts.digests, facts.frozen, facts.tied) == (whole.digests, whole.frozen, whole.tied)
        for name in ("pairs", "to_mean", "norms"):
            found = getattr(facts.distances, name)
            torch.testing.assert_close(found, getattr(whole.distances, name), rtol=1e-12, atol=1e-12)


def test_time_grows_with_the_number_of_tensors_and_not_with_its_square(tmp_path: Path) -> None:
    def seconds(count: int, suffix: str) -> float:
        folder = tmp_path / f"{count}{suffix}"
        for k in range(2):
            write(folder / f"{k}{suffix}", {f"layers.{i}.w": torch.tensor([float(k), i]) for i in range(count)})
        start = time.process_time()
        pool = Pool.open(folder)
        Layout.of(pool, facts=pool.facts(), exclude="layers.7.*")
        return time.process_time() - start

    for suffix in (".safetensors", ".pt"):
        seconds(20, suffix)
        few = min(seconds(400, suffix), seconds(401, suffix))
        many = min(seconds(4000, suffix), seconds(4001, suffix))
        assert many < 20 * few, "ten times as many; the square would be a hundred times"


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
        write(tmp_path / f"{k}.pt", {"exact": torch.tensor([0.5]).to(dtype), "rounded": torch.tensor([0.1]).to(dtype)})
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
    assert facts_of(tmp_path, {"a": late, "b": late.clone()}, {"a": late, "b": late.clone()}).tied == (("a", "b"),)


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
    paths = [write(tmp_path / f"{name}.pt", tensors) for name, tensors in (("g", good), ("b", bad), ("l", late))]
    pool = Pool.open(paths)
    with pytest.raises(PoolError) as caught:
        pool.verify_finite()
    text = str(caught.value)
    assert text.startswith("2 of 3 checkpoints have weights that are not finite\n")
    assert f"{paths[1]}: expected finite weights, found others in 1 of its tensors: layer.weight " in text
    assert "(4 NaN and 8 infinite of 12)" in text
    assert (
        f"{paths[2]}: expected finite weights, found others in 1 of its tensors: layer.bias (1 infinite of 4)" in text
    )
    assert "leave this checkpoint out of the pool" in text
    assert str(paths[0]) not in text
    pool.subset([0]).verify_finite()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64], ids=str
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


# Distances are those of the definition, whatever lies far from zero.


def distances_of(folder: Path, states: list[State]) -> Distances:
    return Pool.open([write(folder / f"{k}.pt", tensors) for k, tensors in enumerate(states)]).facts().distances


def fine_tunes(count: int, spread: float = 0.1) -> list[State]:
    generator = torch.Generator().manual_seed(1)
    base = {"0.weight": torch.randn(8, 6, generator=generator), "0.bias": torch.randn(8, generator=generator)}
    return [
        {name: value + spread * torch.randn(value.shape, generator=generator) for name, value in base.items()}
        for _ in range(count)
    ]


def test_distances_equal_the_definition_for_close_models_far_from_zero(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = {"a": 1e3 + torch.randn(270_000), "b": torch.randn(5, 7)}
    states = [
        {name: value + 1e-3 * (k + 1) * torch.randn_like(value) for name, value in base.items()} for k in range(4)
    ]
    found = distances_of(tmp_path, states)
    flat = [torch.cat([tensors[name].double().reshape(-1) for name in ("a", "b")]) for tensors in states]
    for i in range(4):
        for j in range(4):
            assert float(found.pairs[i, j]) == pytest.approx(float((flat[i] - flat[j]).norm()), rel=1e-9)
    mean = torch.stack(flat).mean(dim=0)
    assert found.to_mean.tolist() == pytest.approx([float((x - mean).norm()) for x in flat], rel=1e-9)
    assert found.norms.tolist() == pytest.approx([float(x.norm()) for x in flat], rel=1e-9)


def test_frozen_tensors_statistics_and_integers_do_not_count_and_tied_ones_count_once(tmp_path: Path) -> None:
    def model(k: int) -> State:
        weight = torch.tensor([3.0 * k, 4.0 * k])
        constant = torch.full((2,), float(k))
        return {
            "a": weight,
            "b": weight.clone(),
            "frozen": torch.arange(5.0),
            "bn.running_mean": torch.tensor([100.0 * k]),
            "steps": torch.tensor(k),
            "bias1": constant,
            "bias2": constant.clone(),  # equal by initialisation: two tensors
            "complex": torch.tensor([1j * k]),
        }

    found = distances_of(tmp_path, [model(1), model(2), model(4)])
    once = (25 + 2 + 2 + 1) ** 0.5
    expected = once * torch.tensor([[0, 1, 3], [1, 0, 2], [3, 2, 0]], dtype=torch.float64)
    torch.testing.assert_close(found.pairs, expected, rtol=1e-12, atol=1e-12)
    assert found.norms.tolist() == pytest.approx([once, 2 * once, 4 * once])
    assert found.to_mean.tolist() == pytest.approx([once * abs(k - 7 / 3) for k in (1, 2, 4)])


def test_duplicates_are_no_distance_apart_and_identical_pools_have_none(tmp_path: Path) -> None:
    one, other = fine_tunes(2)
    found = distances_of(tmp_path / "a", [one, other, one])
    assert float(found.pairs[0, 2]) == 0.0
    same = distances_of(tmp_path / "b", [one, one, one, one])
    assert same.pairs.tolist() == torch.zeros(4, 4).tolist()
    assert same.outlier() is None


def test_the_outlier_stands_out_and_equals_do_not() -> None:
    def of(*to_mean: float) -> int | None:
        zeros = torch.zeros(len(to_mean), len(to_mean))
        return Distances(zeros, torch.tensor(to_mean, dtype=torch.float64), torch.ones(len(to_mean))).outlier()

    assert of(1.0, 1.1, 0.9, 1.0, 5.0) == 4
    assert of(1.0, 1.0, 1.0, 1.0, 1.2) is None  # narrow quartiles make no outlier
    assert of(1.0, 9.0) is None  # two cannot say who is out


def test_copies_with_a_little_between_them_are_near(tmp_path: Path) -> None:
    models = fine_tunes(4)
    assert distances_of(tmp_path / "none", models).near() == []
    copy = {name: value + 1e-4 * torch.randn_like(value) for name, value in models[1].items()}
    assert distances_of(tmp_path / "one", [*models, copy]).near() == [(1, 4)]
    assert distances_of(tmp_path / "same", [models[0]] * 3).near() == []


def test_who_has_no_kin_is_named_and_fine_tunes_are_not(tmp_path: Path) -> None:
    def strangers(name: str, states: list[State]) -> list[int]:
        pool = Pool.open([write(tmp_path / name / f"{k}.pt", tensors) for k, tensors in enumerate(states)])
        return strangers_of(pool.checkpoints, pool.specs)

    kin = fine_tunes(3)
    torch.manual_seed(7)
    alone = {name: torch.randn_like(value) for name, value in kin[0].items()}
    assert strangers("mixed", [kin[0], alone, *kin[1:]]) == [1]
    assert strangers("one", kin) == []
    far = [{name: torch.randn_like(value) for name, value in kin[0].items()} for _ in range(3)]
    assert strangers("none", far) == [0, 1, 2]
    kin[1]["0.weight"][0, 0] = float("nan")
    assert strangers("nan", kin) == []
    pool = Pool.open(tmp_path / "none")
    assert strangers_of(pool.checkpoints[:1], pool.specs) == []


def test_who_is_not_finite_is_the_one_that_stands_out(tmp_path: Path) -> None:
    states = fine_tunes(5)
    states[3]["0.weight"][0, 0] = float("nan")
    found = distances_of(tmp_path, states)
    assert bool(found.to_mean.isnan().all())  # the mean is not finite either
    assert found.outlier() == 3


def test_one_checkpoint_outside_a_pool_is_checked_too(tmp_path: Path) -> None:
    verify_finite(open_checkpoint(write(tmp_path / "good.pt", state())))
    bad = open_checkpoint(write(tmp_path / "bad.pt", {"w": torch.tensor([1.0, float("inf")])}))
    with pytest.raises(PoolError, match=r"1 of 1 checkpoints .*\n.*w \(1 infinite of 2\)"):
        verify_finite(bad)


def test_facts_of_hashes_alone_have_no_distances(tmp_path: Path) -> None:
    for k in range(2):
        write(tmp_path / f"{k}.safetensors", state(seed=k))
    pool = Pool.open(tmp_path)
    facts = pool.facts(measured=False)
    with pytest.raises(PoolError, match=r"distances: expected facts of a measuring pass, found hashes only"):
        _ = facts.distances
    assert pool.facts().digests == facts.digests
    assert pool.facts(measured=False).distances is pool.facts().distances  # known by now
