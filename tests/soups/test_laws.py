"""Laws of the learner and of every method (DESIGN.md, "Laws worth testing")."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from classic import Classic
from stockpot import METHODS, Result, Soup, Task, cook
from stockpot.engine import Engine
from stockpot.soups import LEARNED, settings_for
from stockpot.soups.mehl import schedule, weights
from zoo import fine_tunes, flat, layout_of, learning, mlp, normed, samples, weights_of, write, zoo

SOUPS = sorted(set(METHODS) - {"ensemble"})
# One representative of everything that changes how W follows the coefficients.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("learned", {}),
    ("learned+", {"beta": False}),
    ("hl", {}),
    ("hl+", {"granularity": "module"}),
    ("hl+", {"beta": True}),
    ("mehl", {"block_size": 2}),
    ("mehl+", {"block_size": 2, "passes": 2}),
    ("mehl+", {"block_size": 3, "blocks": 4, "weight_decay": 0.0}),
]
AUTHORS: tuple[str, dict[str, Any]] = ("mehl+", {"block_size": 2, "passes": 2, "preset": "authors"})


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
    method: str, models: int, size: int, granularity: str, preset: str, dtype: torch.dtype, lr: float, seed: int
) -> None:
    simplex = method.startswith("learned")
    authors = preset == "authors" and method in ("hl", "hl+", "mehl", "mehl+")
    blockwise = method in ("mehl", "mehl+", "crossfit")
    switches: dict[str, Any] = {"block_size": min(max(size, 1 + authors), models)} if blockwise else {}
    with tempfile.TemporaryDirectory() as folder:
        states = [{n: v.to(dtype) for n, v in s.items()} for s in fine_tunes(mlp, models, steps=2)]
        task = Task(mlp(), samples(32))
        W = soup_of(
            cook(
                write(Path(folder), states),
                task,
                method,
                preset="authors" if authors else None,
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
    assert torch.equal(result.fit.table, task.score().table)


@pytest.mark.parametrize(("method", "given_"), VARIANTS)
def test_what_was_learned_is_what_W_builds(  # noqa: N802
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, given_: dict[str, Any]
) -> None:
    """The soup of the last step, which the model holds, is the one that W's columns mix."""
    pool, task = zoo(tmp_path, 5)
    with learning(pool, task, method, **brief(**given_)) as learner:
        held: list[torch.Tensor] = []

        def finish(engine: Engine) -> None:
            c, block = learner.folds[0].state.alpha, learner.blocks[-1]
            c = c.softmax(dim=0) if learner.method.simplex else c
            engine.mix(engine.theta_fix(c, block), c[block])
            held.append(learner.live.theta.clone())

        monkeypatch.setattr(learner, "_finish", finish)
        learner.run()
        W = weights(learner.folds[0].state.alpha, learner.method.simplex)
        assert (W - 0.2).abs().max() > 1e-3  # it went somewhere
        built = flat(learner.live, Soup(pool, learner.live.layout, W).state_dict())
        assert len(held) == 1
        for theta in held:
            assert (built - theta).abs().max() <= 3e-6 * max(1.0, float(built.abs().max()))


@pytest.mark.parametrize(("method", "given_"), [*VARIANTS, AUTHORS])
def test_a_learning_rate_of_zero_returns_the_start(tmp_path: Path, method: str, given_: dict[str, Any]) -> None:
    pool, task = zoo(tmp_path, 4)
    found = weights_of(cook(pool, task, method, **brief(**{**given_, "lr": 0.0})))
    wanted = torch.full_like(found, 0.25)
    if given_.get("preset") == "authors":  # their code starts at the mean of the first block
        with learning(pool, task, method, block_size=2, passes=2) as learner:
            first = learner.blocks[0]
        wanted.zero_()
        wanted[first] = 0.5
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_a_block_of_all_models_is_hl_exactly(tmp_path: Path, plus: str, preset: str) -> None:
    pool, task = zoo(tmp_path, 5)
    whole = cook(pool, task, f"hl{plus}", preset=preset, **brief())
    blocks = cook(pool, task, f"mehl{plus}", preset=preset, block_size=5, **brief())
    assert torch.equal(soup_of(whole).W, soup_of(blocks).W)
    assert [dict(h) for h in whole.history] == [dict(h) for h in blocks.history]


@pytest.mark.parametrize(("method", "given_"), [*VARIANTS, AUTHORS, ("crossfit", {"block_size": 2, "folds": 3})])
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
def test_the_learner_walks_the_same_path_as_the_classic_way(tmp_path: Path, method: str) -> None:
    """One graph through all models and torch's own AdamW, against one projection and ours."""
    states = [{n: v.double() for n, v in s.items()} for s in fine_tunes(mlp, 4)]
    pool, task = write(tmp_path, states), Task(mlp().double(), samples(dtype=torch.float64))
    chosen = settings_for(method, beta=False, **brief(steps=12))
    simplex = method.startswith("learned")
    classic = Classic(pool, task, layout_of(pool, str(chosen.granularity)), simplex=simplex)
    losses = classic.learn(chosen)
    result = cook(pool, task, method, beta=False, **brief(steps=12))
    assert [h["loss"] for h in result.history if h["kind"] == "step"] == pytest.approx(losses, rel=1e-9)
    assert (soup_of(result).W - classic.weights().detach()).abs().max() <= 1e-9


@pytest.mark.parametrize("method", SOUPS)
@pytest.mark.parametrize("build", [mlp, normed])
def test_the_soup_of_identical_models_is_that_model(tmp_path: Path, method: str, build: Any) -> None:
    """Whatever a method decides."""
    state = fine_tunes(build, 1)[0]
    task = Task(build(), samples(), statistics="average")
    result = cook(write(tmp_path, [state] * 4), task, method, **brief())
    for name, value in soup_of(result).state_dict().items():
        assert torch.equal(value, state[name]), name
    assert (soup_of(result).W.sum(dim=0) - 1).abs().max() <= 1e-12


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_a_batch_in_any_number_of_pieces_gives_the_same_soup(tmp_path: Path, pieces: int) -> None:
    states = [{n: v.double() for n, v in s.items()} for s in fine_tunes(mlp, 4)]
    pool, task = write(tmp_path, states), Task(mlp().double(), samples(dtype=torch.float64))
    whole, parts = (cook(pool, task, "mehl+", **brief(block_size=2, accumulate=n)) for n in (1, pieces))
    assert (soup_of(whole).W - soup_of(parts).W).abs().max() <= 1e-9
    assert (soup_of(whole).W - 0.25).abs().max() > 1e-3


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
    for seed in (-1, 20_240_131, 2**62, 2**70):  # they are hashed
        cook(pool, task, "mehl", seed=seed, **brief(steps=1))


@given(models=st.integers(1, 30), size=st.integers(1, 30), passes=st.integers(1, 3), seed=st.integers(0, 2**40))
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


def test_the_order_of_blocks_is_the_same_in_every_version() -> None:
    """A run that is continued by a newer version must meet its blocks again."""
    assert schedule(5, 2, passes=2, seed=3) == [[1, 2], [0, 4], [3], [3, 4], [0, 2], [1]]
    assert len({str(schedule(12, 4, passes=4)[start : start + 3]) for start in range(0, 12, 3)}) == 4
    assert schedule(12, 4, seed=1) != schedule(12, 4, seed=2)
    assert schedule(5, 2, blocks=7)[:3] == schedule(5, 2)


def test_coefficients_persist_between_passes(tmp_path: Path) -> None:
    """A second pass goes on from the first one's coefficients, with an optimiser that remembers nothing."""
    pool, task = zoo(tmp_path, 4)
    whole: dict[str, Any] = {"batch_size": 48, "steps": 8, "lr": 0.05}  # every batch is all of the data
    with learning(pool, task, "hl+", **whole, passes=2) as learner:
        learner.run()
    losses = [h["loss"] for h in learner.history()]
    assert losses[8] < losses[7] < losses[0]
