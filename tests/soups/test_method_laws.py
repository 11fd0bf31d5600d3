"""Laws of the learner and of every method (DESIGN.md, "Laws worth testing")."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stockpot import METHODS, Result, Soup, Task, cook
from stockpot.soup.weights import from_offsets
from stockpot.soups.blocks import schedule
from stockpot.soups.classic import Classic
from stockpot.soups.settings import LEARNED, settings_for
from zoo import fine_tunes, flat, layout_of, learning, mlp, normed, samples, write, zoo

SOUPS = sorted(set(METHODS) - {"ensemble"})
# One representative of every switch and setting that changes how W follows the coefficients.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("learned", {}),
    ("learned+", {}),
    ("learned", {"temperature": True}),
    ("hl", {}),
    ("hl+", {"granularity": "module"}),
    ("mehl", {"block_size": 2}),
    ("mehl+", {"block_size": 2, "passes": 2}),
    ("mehl+", {"block_size": 3, "optimizer": "sgd", "momentum": 0.9, "schedule": "constant"}),
    ("mehl+", {"block_size": 2, "passes": 2, "preset": "authors"}),
    ("mehl+", {"block_size": 2, "passes": 2, "unit_norm": True}),
    ("mehl+", {"block_size": 2, "passes": 2, "centre": "soup"}),
    ("mehl+", {"block_size": 2, "passes": 2, "reset": True}),
    ("mehl+", {"block_size": 2, "blocks": 5, "decentralise": False}),
]
# Without the guard: its simple soups break ties of accuracy by place in the pool, as they say.
CROSSFIT: dict[str, Any] = {"block_size": 2, "folds": 3, "guard": False}


def brief(**given_: Any) -> dict[str, Any]:
    return {"steps": 8, "batch_size": 16, "lr": 0.05, **given_}


def soup_of(result: Result) -> Soup:
    assert result.soup is not None
    return result.soup


@given(
    method=st.sampled_from(sorted(LEARNED)),
    models=st.integers(2, 6),
    size=st.integers(1, 6),
    granularity=st.sampled_from(["model", "block", "module", "tensor"]),
    preset=st.sampled_from(["paper", "authors"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    lr=st.sampled_from([0.001, 0.1, 3.0]),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=25)
def test_columns_of_every_learned_soup_sum_to_one(
    method: str,
    models: int,
    size: int,
    granularity: str,
    preset: str,
    dtype: torch.dtype,
    lr: float,
    seed: int,
) -> None:
    simplex = method.startswith("learned")
    switches: dict[str, Any] = {} if simplex or method.startswith("hl") else {"block_size": min(size, models)}
    with tempfile.TemporaryDirectory() as folder:
        states = [{n: v.to(dtype) for n, v in s.items()} for s in fine_tunes(mlp, models, steps=2)]
        task = Task(mlp(), samples(32))
        W = soup_of(
            cook(
                write(Path(folder), states),
                task,
                method,
                preset=None if simplex else preset,
                granularity=granularity,
                seed=seed,
                **brief(steps=3, lr=lr),
                **switches,
            )
        ).W
    assert (W.sum(dim=0) - 1).abs().max() <= 1e-12
    assert not simplex or (W > 0).all()


@pytest.mark.parametrize("method", SOUPS)
def test_every_soup_is_weights_that_sum_to_one_and_the_model_holds_it(tmp_path: Path, method: str) -> None:
    pool, task = zoo(tmp_path)
    result = cook(pool, task, method, **brief())
    soup = soup_of(result)
    assert soup.W.shape == (4, len(soup.layout))
    assert soup.W.dtype == torch.float64
    assert (soup.W.sum(dim=0) - 1).abs().max() <= 1e-12
    assert result.models_used == int((soup.W != 0).any(dim=1).sum())
    state = soup.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in task.model.state_dict().items())
    assert result.fit is not None
    assert torch.equal(result.fit.values, task.score().values)


@pytest.mark.parametrize(("method", "given_"), VARIANTS)
def test_what_was_learned_is_what_W_builds(tmp_path: Path, method: str, given_: dict[str, Any]) -> None:  # noqa: N802
    pool, task = zoo(tmp_path, 5)
    with learning(pool, task, method, **brief(**given_)) as learner:
        learner.run()
        track = learner.tracks[0]
        free = given_.get("decentralise") is False
        soup = Soup(pool, learner.live.layout, track.W, free=free)
        assert (track.W - 0.2).abs().max() > 1e-3  # it went somewhere
        assert ((track.W.sum(dim=0) - 1).abs().max() > 1e-3) == free
        built = flat(learner.live, soup.state_dict())
        # theta is a running sum in fp32 over all steps' blocks; W is followed in fp64.
        assert (built - track.theta).abs().max() <= 3e-6 * max(1.0, float(built.abs().max()))


@pytest.mark.parametrize(("method", "given_"), VARIANTS)
def test_a_learning_rate_of_zero_returns_the_start(
    tmp_path: Path, method: str, given_: dict[str, Any]
) -> None:
    pool, task = zoo(tmp_path, 4)
    result = cook(pool, task, method, **brief(**{**given_, "lr": 0.0}))
    soup = soup_of(result)
    starts_at_a_block = given_.get("centre") == "soup" or given_.get("preset") == "authors"
    wanted = torch.full((4, len(soup.layout)), 0.25, dtype=torch.float64)
    if starts_at_a_block:
        with learning(pool, task, method, **brief(**given_)) as learner:
            first = learner.blocks[0]
        wanted.zero_()
        wanted[first] = 1 / len(first)
    assert torch.equal(soup.W, wanted)


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_a_block_of_all_models_is_hl_exactly(tmp_path: Path, plus: str, preset: str) -> None:
    pool, task = zoo(tmp_path, 5)
    whole = cook(pool, task, f"hl{plus}", preset=preset, **brief())
    blocks = cook(pool, task, f"mehl{plus}", preset=preset, block_size=5, **brief())
    assert torch.equal(soup_of(whole).W, soup_of(blocks).W)
    assert [dict(h) for h in whole.history] == [dict(h) for h in blocks.history]


@pytest.mark.parametrize(("method", "given_"), [*VARIANTS, ("crossfit", CROSSFIT)])
def test_permuting_ingredients_permutes_W_and_nothing_else(  # noqa: N802
    tmp_path: Path, method: str, given_: dict[str, Any]
) -> None:
    # fp64, so that only a wrong order of models could make a difference
    states = [{n: v.double() for n, v in s.items()} for s in fine_tunes(mlp, 5)]
    task = Task(mlp().double(), samples(dtype=torch.float64))
    order = [3, 0, 4, 2, 1]
    plain = cook(write(tmp_path / "plain", states), task, method, **brief(**given_))
    mixed = cook(write(tmp_path / "mixed", [states[k] for k in order]), task, method, **brief(**given_))
    assert (soup_of(plain).W[order] - soup_of(mixed).W).abs().max() <= 1e-8
    for name, value in soup_of(plain).state_dict().items():
        assert (value - soup_of(mixed).state_dict()[name]).abs().max() <= 1e-8


def test_permuting_ingredients_permutes_the_simple_soups(tmp_path: Path) -> None:
    # A continuous metric: ties are broken by place in the pool.
    pool, task = zoo(tmp_path, 5, metric="loss")
    order = [3, 0, 4, 2, 1]
    for method in ("best", "uniform", "greedy"):
        plain = soup_of(cook(pool, task, method)).W
        assert torch.equal(plain[order], soup_of(cook(pool.subset(order), task, method)).W), method


@pytest.mark.parametrize("method", ["learned", "learned+", "hl", "hl+"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_learner_walks_the_same_path_as_the_classic_way(
    tmp_path: Path, method: str, optimizer: str
) -> None:
    states = [{n: v.double() for n, v in s.items()} for s in fine_tunes(mlp, 4)]
    pool, task = write(tmp_path, states), Task(mlp().double(), samples(dtype=torch.float64))
    chosen = settings_for(method, optimizer=optimizer, label_smoothing=0.05, **brief(steps=12))
    classic = Classic(
        pool, task, layout_of(pool, str(chosen.granularity)), simplex=method.startswith("learned")
    )
    losses = classic.learn(chosen)
    with learning(
        pool, task, method, optimizer=optimizer, label_smoothing=0.05, **brief(steps=12)
    ) as learner:
        learner.run()
    assert [h["loss"] for h in learner.history if h["kind"] == "step"] == pytest.approx(losses, rel=1e-9)
    assert (learner.tracks[0].W - classic.weights().detach()).abs().max() <= 1e-9


@pytest.mark.parametrize("method", ["mehl+", "learned", "crossfit"])
def test_the_same_seed_twice_is_bit_identical(tmp_path: Path, method: str) -> None:
    pool, task = zoo(tmp_path, 5, build=normed)
    given_: dict[str, Any] = {} if method == "learned" else {"block_size": 2}
    first = cook(pool, task, method, seed=7, **brief(**given_))
    torch.manual_seed(123)  # nobody else's random numbers matter
    second = cook(pool, task, method, seed=7, **brief(**given_))
    other = cook(pool, task, method, seed=8, **brief(**given_))
    assert torch.equal(soup_of(first).W, soup_of(second).W)
    assert first.history == second.history
    assert other.history != first.history


def test_learning_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    cook(pool, task, "mehl", **brief(block_size=2))
    assert torch.equal(torch.rand(3), wanted)


def test_any_whole_number_is_a_seed(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    for seed in (-1, 20_240_131, 2**62, 2**70):
        cook(pool, task, "mehl", seed=seed, **brief(steps=1))


@given(
    models=st.integers(1, 30),
    size=st.integers(1, 30),
    passes=st.integers(1, 3),
    seed=st.integers(0, 2**40),
)
def test_every_model_is_visited_once_per_pass(models: int, size: int, passes: int, seed: int) -> None:
    size = min(size, models)
    blocks = schedule(models, size, passes=passes, seed=seed)
    per_pass = -(-models // size)
    assert len(blocks) == passes * per_pass
    assert all(len(block) <= size and block == sorted(block) for block in blocks)
    for number in range(passes):
        visited = [k for block in blocks[number * per_pass : (number + 1) * per_pass] for k in block]
        assert sorted(visited) == list(range(models))
    assert schedule(models, size, blocks=len(blocks) - 1, seed=seed) == blocks[:-1] or len(blocks) == 1


def test_coefficients_persist_between_visits_unless_they_are_reset(tmp_path: Path) -> None:
    """Without reset a second visit goes on from the first one's coefficients; with it, the soup keeps what the first
    visit did and the second adds its own."""
    pool, task = zoo(tmp_path, 4)
    for reset in (False, True):
        with learning(pool, task, "hl+", **brief(passes=2, reset=reset)) as learner:
            learner.run()
        first, second = (learner.visits.done[f"{t}.0"] for t in (0, 1))
        assert (first - second).abs().max() > 1e-3
        offsets = first + second if reset else second
        assert torch.allclose(learner.tracks[0].W, from_offsets(offsets), atol=1e-6)
