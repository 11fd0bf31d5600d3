"""What the tensors of a soup are, given W."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from stockpot.errors import PoolError, SoupError
from stockpot.layout import Layout
from stockpot.pool import Pool
from stockpot.soup import Soup, contents, weights
from stockpot.soup.weights import CHUNK, check_holds, kept_tensor, mix_tensor
from zoo import Tied, fine_tunes, layout_of, mlp, normed, same, write

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# One rounding of the result in its own dtype, plus K roundings of the sum in fp32 (fp64).
ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3)
pools = st.tuples(st.integers(1, 9), shapes, st.sampled_from(DTYPES), st.integers(0, 2**31))


def random(generator: torch.Generator, shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@given(pools, st.booleans())
@settings(max_examples=150)
def test_a_tensor_of_a_soup_is_the_weighted_sum(
    case: tuple[int, list[int], torch.dtype, int], extrapolate: bool
) -> None:
    K, shape, dtype, seed = case
    generator = torch.Generator().manual_seed(seed)
    parts = [random(generator, shape, dtype) for _ in range(K)]
    w = torch.randn(K, generator=generator, dtype=torch.float64)
    w = w + (1 - w.sum()) / K if extrapolate else torch.softmax(w, dim=0)
    wanted = sum((float(c) * part.double() for c, part in zip(w, parts, strict=True)), torch.zeros(shape).double())
    found = mix_tensor(parts, w.tolist())
    scale = float(w.abs().sum()) * max([float(part.abs().max()) for part in parts if part.numel()], default=0.0)
    assert found.shape == torch.Size(shape)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = ROUNDING[torch.float64 if dtype == torch.float64 else torch.float32]
    assert ((found.double() - wanted).abs() <= tolerance * scale).all()


@given(pools, st.booleans())
@settings(max_examples=100)
def test_a_soup_of_identical_models_is_that_model(
    case: tuple[int, list[int], torch.dtype, int], extrapolate: bool
) -> None:
    K, shape, dtype, seed = case
    generator = torch.Generator().manual_seed(seed)
    part = random(generator, shape, dtype)
    w = torch.randn(K, generator=generator, dtype=torch.float64)
    w = w + (1 - w.sum()) / K if extrapolate else torch.softmax(w, dim=0)
    assert torch.equal(mix_tensor([part] * K, w.tolist()).to(dtype), part)


@given(pools)
@settings(max_examples=50)
def test_a_soup_of_one_is_that_one(case: tuple[int, list[int], torch.dtype, int]) -> None:
    K, shape, dtype, seed = case
    generator = torch.Generator().manual_seed(seed)
    parts = [random(generator, shape, dtype) for _ in range(K)]
    k = seed % K
    assert torch.equal(mix_tensor(parts, [float(i == k) for i in range(K)]).to(dtype), parts[k])


def test_a_tensor_longer_than_a_chunk() -> None:
    parts = [torch.arange(CHUNK + 7).float() * k for k in (0, 1, 2)]
    assert torch.equal(mix_tensor(parts, [0.25, 0.5, 0.25]), parts[1])


@given(st.permutations(range(4)), st.integers(0, 2**31))
@settings(max_examples=20)
def test_permuting_ingredients_and_their_weights_changes_nothing_but_rounding(order: list[int], seed: int) -> None:
    W = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    W += (1 - W.sum(dim=0)) / 4
    with tempfile.TemporaryDirectory() as folder:
        pool = write(Path(folder), fine_tunes(mlp, 4, steps=0))
        layout = Layout.of(pool)
        plain = Soup(pool, layout, W).state_dict()
        permuted = Soup(pool.subset(order), layout, W[order]).state_dict()
        for name, value in plain.items():
            assert torch.allclose(permuted[name], value, rtol=0, atol=2e-6 * float(W.abs().sum(dim=0).max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ingredients_dtype_stays_unless_told_otherwise(tmp_path: Path, dtype: torch.dtype) -> None:
    states = [{"w": state["0.weight"].to(dtype)} for state in fine_tunes(mlp, 4)]
    soup = Soup.uniform(write(tmp_path, states))
    wanted = torch.stack([state["w"].double() for state in states]).mean(dim=0)
    found = soup.state_dict()["w"]
    assert found.dtype == dtype
    assert ((found.double() - wanted).abs() <= ROUNDING[dtype] * wanted.abs().max()).all()
    assert soup.state_dict(dtype=torch.float16)["w"].dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_without_scales_is_mixed_like_any_other_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    """Torch can neither add them nor find the largest."""
    values = [torch.tensor([value, 2.0 * value, 224.0]).to(dtype) for value in (1.0, 1.0, 2.0, 4.0)]
    pool = write(tmp_path, [{"w": value, "bn.running_mean": value} for value in values])
    found = Soup.uniform(pool).state_dict()["w"]
    assert found.dtype == dtype
    one = Soup(pool, Layout.of(pool), torch.eye(4, dtype=torch.float64)[:, 2:3]).state_dict()
    assert one["w"].view(torch.uint8).equal(values[2].view(torch.uint8))
    assert found.float().tolist() == [2.0, 4.0, 224.0]
    far = Soup(pool, Layout.of(pool), torch.tensor([[-3e4], [0], [0], [3e4 + 1]], dtype=torch.float64))
    with pytest.raises(SoupError, match=f"soup tensor w: expected values that {str(dtype)[6:]} can hold"):
        far.state_dict()


def test_what_float8_rounds_down_by_more_than_half_a_step_is_refused() -> None:
    """Its largest number is 448, and steps there are 32; torch rounds all above to 448."""
    check_holds(torch.tensor([-460.0, 1.0]), "w", torch.float8_e4m3fn)
    with pytest.raises(SoupError, match="can hold, up to 448, found one of 470"):
        check_holds(torch.tensor([-470.0, 1.0]), "w", torch.float8_e4m3fn)


def test_sums_are_kept_in_single_precision(tmp_path: Path) -> None:
    """In bf16 itself the small parts would be lost one by one: 256 + 1 = 256 there."""
    states = [{"w": torch.full((3,), value).bfloat16()} for value in [256.0] + [1.0] * 31]
    found = Soup.uniform(write(tmp_path, states)).state_dict()["w"]
    assert found.tolist() == [torch.tensor((256 + 31) / 32).bfloat16().item()] * 3


def test_groups_have_their_own_columns(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 2))
    layout = Layout.of(pool, "module")
    W = torch.tensor([[1.0, -0.5], [0.0, 1.5]], dtype=torch.float64)
    state = Soup(pool, layout, W).state_dict()
    assert torch.equal(state["0.weight"], pool.tensor(0, "0.weight"))
    outside = 1.5 * pool.tensor(1, "2.weight") - 0.5 * pool.tensor(0, "2.weight")
    assert torch.allclose(state["2.weight"], outside, atol=1e-6)


def test_frozen_is_copied_excluded_is_the_donors_integers_are_the_heaviests(tmp_path: Path) -> None:
    states = fine_tunes(mlp, 3)
    for k, state in enumerate(states):
        state["frozen"] = torch.tensor([0.1, -0.0])
        state["ids"] = torch.tensor([k, k + 1])
        state["flag"] = torch.tensor(k == 2)
    pool = write(tmp_path, states)
    layout = layout_of(pool, "model", exclude="2.*", donor=1)
    W = torch.tensor([[0.2], [0.3], [0.5]])
    state = Soup(pool, layout, W).state_dict()
    assert torch.equal(state["frozen"].view(torch.int32), states[0]["frozen"].view(torch.int32))
    assert torch.equal(state["2.weight"], states[1]["2.weight"])
    assert state["ids"].tolist() == [2, 3]
    assert bool(state["flag"])
    tie = Soup(pool, layout, torch.tensor([[0.0], [0.5], [0.5]]))
    assert tie.state_dict()["ids"].tolist() == [1, 2]  # the first of equals


def test_tied_tensors_stay_equal_to_the_last_bit(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(Tied, 3))
    layout = layout_of(pool)
    W = torch.softmax(torch.randn(3, len(layout), generator=torch.Generator().manual_seed(1)), dim=0)
    state = Soup(pool, layout, W).state_dict()
    assert torch.equal(state["inner.weight"], state["outer.weight"])
    assert state["inner.weight"].data_ptr() != state["outer.weight"].data_ptr()  # safetensors wants them apart


def test_statistics_are_averaged_without_extrapolating_or_given(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(normed, 3))
    layout = layout_of(pool, "model")
    W = torch.tensor([[1.5], [-1.0], [0.5]])
    own = [pool.tensor(k, "1.running_var") for k in range(3)]
    averaged = Soup(pool, layout, W).state_dict()["1.running_var"]
    assert torch.allclose(averaged, 0.75 * own[0] + 0.25 * own[2], atol=1e-6)
    given_ = {"1.running_var": torch.full((8,), 2.0)}
    state = Soup(pool, layout, W, statistics=given_).state_dict()
    assert torch.equal(state["1.running_var"], given_["1.running_var"])
    mean = 0.75 * pool.tensor(0, "1.running_mean") + 0.25 * pool.tensor(2, "1.running_mean")
    assert torch.allclose(state["1.running_mean"], mean, atol=1e-6)


def test_copied_statistics_are_the_donors_as_the_documentation_says(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(normed, 3))
    layout = layout_of(pool, "model", donor=1)
    W = torch.tensor([[0.8], [0.0], [0.2]])  # the donor is not the heaviest
    copied = Soup(pool, layout, W, statistics_rule="copy").state_dict()
    assert torch.equal(copied["1.running_var"], pool.tensor(1, "1.running_var"))
    assert torch.equal(copied["1.num_batches_tracked"], pool.tensor(0, "1.num_batches_tracked"))


@pytest.mark.parametrize("rule", ["average", "copy", "recalibrate"])
def test_a_soup_of_one_ingredient_has_its_own_statistics(tmp_path: Path, rule: Any) -> None:
    pool = write(tmp_path, fine_tunes(normed, 3))
    soup = Soup(pool, layout_of(pool, "model"), weights.chosen(3, 1, [2]), statistics_rule=rule)
    assert torch.equal(soup.state_dict()["1.running_var"], pool.tensor(2, "1.running_var"))


@pytest.mark.parametrize("rule", ["average", "copy", "recalibrate"])
def test_what_is_scored_while_learning_is_what_is_written(tmp_path: Path, rule: Any) -> None:
    """One rule, in one place: `kept_tensor` gives the file's values for every tensor that is not mixed."""
    states = fine_tunes(normed, 3)
    for k, state in enumerate(states):
        state["ids"], state["frozen"] = torch.tensor([k, k + 1]), torch.ones(2)
    pool = write(tmp_path, states)
    layout = layout_of(pool, "module", exclude="4.*", donor=2)
    W = torch.tensor([[0.1, 1.1], [0.4, -0.6], [0.5, 0.5]], dtype=torch.float64)
    state = Soup(pool, layout, W, statistics_rule=rule).state_dict()
    assert set(layout.kept.values()) == {"frozen", "excluded", "integer", "statistic"}
    for name in layout.kept:
        assert torch.equal(kept_tensor(pool, layout, W, name, rule), state[name]), name


def test_a_statistic_is_the_average_over_positive_weights(tmp_path: Path) -> None:
    values = (1.0, 2.0, 100.0)
    pool = write(tmp_path, [{"w": torch.tensor([v]), "bn.running_mean": torch.tensor([v])} for v in values])
    layout = Layout.of(pool, "model")
    for row, wanted in (([0.75, 0.75, -0.5], 1.5), ([0.6, 0.2, 0.2], 21.0), ([0.0, 1.0, 0.0], 2.0)):
        W = torch.tensor(row, dtype=torch.float64)[:, None]
        found = kept_tensor(pool, layout, W, "bn.running_mean", "average")
        assert found.tolist() == pytest.approx([wanted])


@pytest.mark.parametrize(
    ("W", "text"),
    [
        (torch.full((2, 1), 0.5), "expected a matrix of 3 ingredients x 1 groups, found shape (2, 1)"),
        (torch.full((3, 1), 0.3), "expected columns that sum to one, found a column off by 0.1"),
        (torch.tensor([[1.0], [torch.nan], [0.0]]), "expected finite numbers, found 1 NaN or Inf"),
    ],
)
def test_weights_that_are_none(tmp_path: Path, W: Tensor, text: str) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 3))
    with pytest.raises(SoupError) as caught:
        Soup(pool, Layout.of(pool, "model"), W)
    assert f"mixing weights: {text}" in str(caught.value)


def test_load_into_gives_the_model_the_soup(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(normed, 3))
    soup = Soup.uniform(pool)
    model = normed()
    soup.load_into(model)
    assert same(model.state_dict(), soup.state_dict())


def test_load_into_another_model_says_what_differs_and_touches_nothing(tmp_path: Path) -> None:
    soup = Soup.uniform(write(tmp_path, fine_tunes(mlp, 3)))
    for model, found in (
        (torch.nn.Sequential(torch.nn.Linear(6, 8)), "found the model lacks 2: 2.bias, 2.weight."),
        (
            torch.nn.Sequential(*mlp().children(), torch.nn.Linear(3, 3)),
            "found the model has 2 more: 3.weight, 3.bias.",
        ),
        (mlp(hidden=9), "found 3 with other shapes: 0.bias: model (9,), pool"),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(SoupError) as caught:
            soup.load_into(model)
        assert "model Sequential: expected the tensors of the ingredients" in str(caught.value)
        assert found in str(caught.value)
        assert same(model.state_dict(), before)


def test_load_into_a_model_with_tied_names_unsaved_buffers_and_counters(tmp_path: Path) -> None:
    """What a task accepts as this pool's model, a soup loads into."""
    states = fine_tunes(Tied, 2)
    for state in states:
        del state["outer.weight"]
        state["ids"] = torch.arange(3)
    model = Tied()
    model.register_buffer("ids", torch.zeros(3, dtype=torch.long), persistent=False)
    model.register_buffer("num_batches_tracked", torch.tensor(7))
    soup = Soup.uniform(write(tmp_path, states))
    soup.load_into(model)
    assert torch.equal(model.outer.weight, soup.state_dict()["inner.weight"])
    assert model.get_buffer("ids").tolist() == [0, 1, 2]


def test_what_is_built_without_being_asked_for_anything(tmp_path: Path) -> None:
    """Averaged statistics, weights that sum to one, the ingredients' dtype, excluded tensors of the first."""
    pool = write(tmp_path, fine_tunes(normed, 3))
    layout = Layout.of(pool, "model", exclude=["4.bias"])
    W = weights.uniform(3, 1)
    built = dict(contents.tensors(pool, layout, W))
    assert same(built, Soup(pool, layout, W, statistics_rule="average").state_dict())
    assert torch.equal(built["4.bias"], pool.tensor(0, "4.bias"))
    own = torch.stack([pool.tensor(k, "1.running_var") for k in range(3)])
    assert torch.allclose(built["1.running_var"], own.mean(dim=0))


@pytest.mark.parametrize(("cores", "hashed", "wide"), [(8, True, True), (7, True, False), (8, False, False)])
def test_many_idle_cores_share_an_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, hashed: bool, wide: bool
) -> None:
    """Not while the digests are computed beside: the slowest thread would hold up all others."""
    pool = write(tmp_path / "pool", fine_tunes(mlp, 3))
    assert not pool.hashed
    if hashed:
        pool.digests()
    seen = set[bool]()

    def mixed(*args: Any, wide: bool, **options: Any) -> Tensor:
        seen.add(wide)
        return mix_tensor(*args, **options)

    monkeypatch.setattr(contents, "mix_tensor", mixed)
    monkeypatch.setattr("torch.get_num_threads", lambda: cores)
    Soup.uniform(pool).save(tmp_path / "soup")
    assert seen == {wide}
    assert pool.hashed


def test_tensors_after_a_tied_pair_are_their_own(tmp_path: Path) -> None:
    """The pair is mixed once; what comes after it in the file must not move up."""
    states = []
    for k in range(3):
        generator = torch.Generator().manual_seed(k)
        tied, last = torch.randn(4, generator=generator), torch.randn(4, generator=generator)
        states.append({"a": tied, "b": tied, "c": last, "d": last * 2})
    pool = write(tmp_path, states)
    layout = layout_of(pool)
    assert layout.tied == (("a", "b"),)
    state = Soup(pool, layout, weights.uniform(3, len(layout))).state_dict()
    for name in "abcd":
        assert torch.allclose(state[name], torch.stack([s[name] for s in states]).mean(dim=0), atol=1e-6), name


def test_a_soup_its_type_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    pool = write(tmp_path, [{"w": torch.full((3,), sign * 6e4).half()} for sign in (1, -1)])
    soup = Soup(pool, Layout.of(pool), torch.tensor([[2.0], [-1.0]], dtype=torch.float64))
    with pytest.raises(SoupError, match="w"):
        soup.state_dict()


def test_a_name_that_no_safetensors_file_can_have_is_refused_before_cooking(tmp_path: Path) -> None:
    for k in range(2):
        torch.save({"w": torch.ones(2) * k, "__metadata__": torch.ones(2) * k}, tmp_path / f"{k}.pt")
    with pytest.raises(PoolError, match="__metadata__"):
        Pool.open(tmp_path)


@pytest.mark.parametrize("max_shard", ["5GB", 90])
def test_buffers_that_overlap_are_saved_each_for_itself(tmp_path: Path, max_shard: int | str) -> None:
    """Frozen and integer tensors come as views of the file, where they may lie upon each other."""
    (tmp_path / "pool").mkdir()
    for k in range(2):
        base, ids = torch.arange(10.0), torch.arange(10)
        state = {"w": torch.ones(4) * k, "a": base[:6], "b": base[3:], "c": base.expand(2, 10)}
        state |= {"ids": ids[:6], "more": ids[3:], "all": ids}
        torch.save(state, tmp_path / "pool" / f"{k}.pt")
    pool = Pool.open(tmp_path / "pool")
    layout = layout_of(pool)
    saved = Soup(pool, layout, weights.uniform(2, len(layout))).save(tmp_path / "soup", max_shard=max_shard)
    found: dict[str, Tensor] = {}
    for file in saved.glob("*.safetensors"):
        found |= load_file(file)
    assert same(found, state | {"w": torch.full((4,), 0.5)})
