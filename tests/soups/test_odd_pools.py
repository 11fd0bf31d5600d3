"""Bad numbers in the ingredients, and odd pools: a result that is right, or an error that says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stockpot import Event, Pool, Soup, Task, cook
from stockpot.errors import PoolError, SoupError
from stockpot.soup import weights
from stockpot.soups import LEARNED
from zoo import fine_tunes, layout_of, mlp, same, samples, write, zoo

BRIEF: dict[str, Any] = {"steps": 4, "batch_size": 16}


def with_bad(folder: Path, *bad: int, count: int = 4, value: float = torch.nan) -> Pool:
    states = fine_tunes(mlp, count)
    for k in bad:
        states[k]["2.weight"][0, 0] = value
    return write(folder, states)


# NaN and infinity


def test_dropping_leaves_an_event_and_a_note_in_every_result(tmp_path: Path) -> None:
    events: list[Event] = []
    pool = with_bad(tmp_path, 1, value=torch.inf).drop_nonfinite(events.append)
    assert pool.names == ("model_0", "model_2", "model_3")
    assert pool.dropped == ("model_1",)
    (event,) = [event for event in events if event.kind == "dropped"]
    assert event.data["names"] == ["model_1"]
    assert "1 infinite of 24" in event.data["why"][0]
    note = "left out, because their weights are not finite: model_1"
    for method in ("uniform", "best", "hl+", "ensemble"):
        result = cook(pool, Task(mlp(), samples()), method, **BRIEF)
        assert note in result.notes
        assert note in str(result)
    assert pool.subset([0, 1]).dropped == ("model_1",)


def test_a_sound_pool_is_kept_as_it_is(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path)
    assert pool.drop_nonfinite() is pool
    assert pool.dropped == ()


@pytest.mark.parametrize(("bad", "left"), [((0, 1, 2, 3), 0), ((0, 2, 3), 1)])
def test_dropping_all_or_all_but_one_is_refused(tmp_path: Path, bad: tuple[int, ...], left: int) -> None:
    with pytest.raises(PoolError) as caught:
        with_bad(tmp_path, *bad).drop_nonfinite()
    text = str(caught.value)
    assert f"expected at least two checkpoints without NaN or infinity, found {left} of 4" in text
    assert "model_0.safetensors: expected finite weights, found others in 1 of its tensors: 2.weight" in text


@pytest.mark.parametrize("method", sorted(LEARNED))
def test_learning_on_an_ingredient_that_is_not_finite_names_it(tmp_path: Path, method: str) -> None:
    pool = with_bad(tmp_path, 2)
    with pytest.raises(PoolError, match=r"1 of 4 checkpoints have weights that are not finite\n.*model_2"):
        cook(pool, Task(mlp(), samples()), method, **BRIEF)


def test_simple_soups_of_it_are_refused_too(tmp_path: Path) -> None:
    pool = with_bad(tmp_path, 2)
    with pytest.raises(SoupError) as caught:
        cook(pool, Task(mlp(), samples()), "uniform")
    assert "soup tensor 2.weight: expected finite values, found NaN or infinity" in str(caught.value)
    assert "Pool.drop_nonfinite leaves them out; in a recipe, pool.nonfinite: drop" in str(caught.value)
    for method in ("best", "greedy"):  # they never choose it: nothing it says is right
        soup = cook(pool, Task(mlp(), samples()), method).soup
        assert soup is not None
        assert not soup.W[2].any()


# Overflow


def halves(folder: Path, *values: float) -> Pool:
    base = {name: value.half() for name, value in fine_tunes(mlp, 1)[0].items()}
    states = []
    for value in values:
        state = {name: tensor.clone() for name, tensor in base.items()}
        state["0.bias"][0] = value
        states.append(state)
    return write(folder, states)


def test_the_mean_of_large_halves_is_right(tmp_path: Path) -> None:
    """60000 + 60000 overflows fp16 and 60000 - (-60000) does too; sums are fp32."""
    state = Soup.uniform(halves(tmp_path / "a", 60000, 60000, 60000)).state_dict()
    assert state["0.bias"][0] == 60000
    state = Soup.uniform(halves(tmp_path / "b", 60000, -60000)).state_dict()
    assert state["0.bias"][0] == 0


def test_a_soup_that_fp16_cannot_hold_is_not_written(tmp_path: Path) -> None:
    pool = halves(tmp_path / "pool", 40000, 10000)
    layout = layout_of(pool, "model")
    soup = Soup(pool, layout, torch.tensor([[2.0], [-1.0]], dtype=torch.float64))
    for write_it in (soup.state_dict, lambda: soup.save(tmp_path / "soup"), lambda: soup.load_into(mlp())):
        with pytest.raises(SoupError) as caught:
            write_it()
        text = str(caught.value)
        assert "soup tensor 0.bias: expected values that float16 can hold, up to 65504, found one of 70000" in text
        assert "store the soup in a wider type" in text
    assert not (tmp_path / "soup").exists()
    assert soup.state_dict(dtype=torch.float32)["0.bias"][0] == 70000
    assert soup.state_dict(dtype=torch.bfloat16)["0.bias"][0].isfinite()
    Soup.load(soup.save(tmp_path / "wide", dtype=torch.float32))


@pytest.mark.parametrize(("value", "held"), [(65504.0, True), (65519.0, True), (65520.0, False)])
def test_the_limit_is_where_rounding_puts_it(tmp_path: Path, value: float, held: bool) -> None:
    states = fine_tunes(mlp, 2)
    for state in states:
        state["0.bias"][0] = value
        state["0.bias"][1] = 0.0
    states[1]["0.bias"][1] = 1.0
    soup = Soup.uniform(write(tmp_path, states))
    if held:
        assert soup.state_dict(dtype=torch.float16)["0.bias"][0] == 65504
    else:
        with pytest.raises(SoupError, match="65504, found one of 65520"):
            soup.state_dict(dtype=torch.float16)


# Directions of no length, and of hardly any


@pytest.mark.parametrize(
    ("method", "preset"), [("mehl+", None), ("mehl+", "authors"), ("hl", "authors"), ("crossfit", None)]
)
def test_an_ingredient_that_is_the_mean_has_no_direction(tmp_path: Path, method: str, preset: str | None) -> None:
    """Scaling it to unit norm must not divide by zero."""
    a, b = fine_tunes(mlp, 2)
    middle = {name: (a[name].double() + b[name].double()).div(2).float() for name in a}
    pool = write(tmp_path, [a, b, middle, middle])
    soup = cook(pool, Task(mlp(), samples()), method, preset=preset, **BRIEF).soup
    assert soup is not None
    assert bool(soup.W.isfinite().all())
    assert (soup.W.sum(dim=0) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("size", [1e-6, 1e-12, 1e-20, 1e-30, 1e-42])
@pytest.mark.parametrize("given", [{}, {"preset": "authors"}, {"directions": "int8"}, {"directions": "bf16"}], ids=str)
def test_tiny_directions_give_finite_soups(tmp_path: Path, size: float, given: dict[str, Any]) -> None:
    base = fine_tunes(mlp, 1)[0]
    base["0.bias"].zero_()  # where no difference is too small for a float
    noise = torch.Generator().manual_seed(0)
    states = [
        {name: value + size * torch.randn(value.shape, generator=noise) for name, value in base.items()}
        for _ in range(4)
    ]
    states[0]["2.bias"] += 0.1  # something that is mixed for sure
    result = cook(write(tmp_path, states), Task(mlp(), samples()), "mehl+", **BRIEF, **given)
    assert result.soup is not None
    assert all(bool(value.isfinite().all()) for value in result.soup.state_dict().values())


def test_large_weights_that_cancel_are_still_weights() -> None:
    big = 1e15 / 3
    W = torch.tensor([[big], [1.0 - big]], dtype=torch.float64)
    weights.check(W + torch.tensor([[0.3], [0.0]], dtype=torch.float64), 2, 1)
    with pytest.raises(SoupError, match=r"a column off by 0\.3"):
        weights.check(torch.tensor([[1.0], [0.3]], dtype=torch.float64), 2, 1)


# Odd pools


@pytest.mark.parametrize("method", ["uniform", "greedy", "hl+", "crossfit", "learned"])
def test_copies_of_two_models_mix_like_the_two(tmp_path: Path, method: str) -> None:
    a, b = fine_tunes(mlp, 2)
    soup = cook(write(tmp_path, [a, b, a, b]), Task(mlp(), samples()), method, **BRIEF).soup
    assert soup is not None
    assert bool(soup.W.isfinite().all())
    if method == "uniform":
        two = Soup.uniform(write(tmp_path / "two", [a, b])).state_dict()
        assert all(torch.allclose(value, two[name], atol=1e-6) for name, value in soup.state_dict().items())


@pytest.mark.parametrize("method", ["uniform", "best", "crossfit"])
def test_the_soup_of_one_ingredient_is_that_ingredient(tmp_path: Path, method: str) -> None:
    pool, task = zoo(tmp_path)
    soup = cook(pool.subset([1]), task, method, **BRIEF).soup
    assert soup is not None
    assert same(soup.state_dict(), {name: pool.tensor(1, name) for name in pool.specs})


# Labels


def test_constant_labels_are_allowed_and_said(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path)
    x, y = samples()
    for method in ("best", "hl+", "crossfit"):
        result = cook(pool, Task(mlp(), (x, torch.ones_like(y))), method, **BRIEF)
        assert "all 48 labels of the fitting data are 1: whatever always says so is right" in result.notes
    assert not any("labels" in note for note in cook(pool, Task(mlp(), (x, y)), "best").notes)


def test_a_class_that_some_fold_lacks_is_said(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path)
    x, y = samples()
    y = torch.where(y == 2, 0, y)
    y[5] = 2
    result = cook(pool, Task(mlp(), (x, y)), "crossfit", **BRIEF)
    assert "class 2 has fewer than 4 samples: some of the 4 folds are judged without" in result.notes
    assert result.held_out is not None
    assert result.held_out.n == 48
    assert not any("fewer" in note for note in cook(pool, Task(mlp(), samples()), "crossfit", **BRIEF).notes)


def test_less_data_than_a_batch_is_one_batch(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path)
    few = samples(9)
    small = cook(pool, Task(mlp(), few), "hl+", steps=4, batch_size=128).soup
    exact = cook(pool, Task(mlp(), few), "hl+", steps=4, batch_size=9).soup
    assert small is not None
    assert exact is not None
    assert torch.equal(small.W, exact.W)
    assert same(small.state_dict(), exact.state_dict())
