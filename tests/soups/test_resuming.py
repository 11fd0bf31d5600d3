"""A run that is killed anywhere and continued gives what it would have given, to the last bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from stockpot import Result, Soup, Task, cook
from stockpot.errors import RunError
from stockpot.events import Event
from stockpot.pool import Pool
from zoo import decide, mlp, normed, zoo

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("mehl+", {"block_size": 2}),
    "two passes": ("mehl", {"block_size": 3, "passes": 2}),
    "all at once": ("hl", {"weight_decay": 0.0}),
    "as the authors do it": ("mehl+", {"block_size": 2, "passes": 2, "preset": "authors"}),
    "softmax with beta": ("learned+", {}),
    "beta and folds": ("mehl+", {"block_size": 2, "beta": True, "folds": 2}),
    "folds, guard, early stopping": ("crossfit", {"block_size": 2, "folds": 2, "lr": 0.3}),
    "many ways back": ("crossfit", {"folds": 2, "lr": 4.0, "steps": 20}),
    "beta of folds": ("crossfit", {"folds": 2, "beta": True, "lr": 0.5, "steps": 20}),
    "pieces": ("mehl+", {"block_size": 2, "blocks": 3, "accumulate": 3}),
    "epochs": ("mehl+", {"block_size": 2, "steps": None, "epochs": 1.5}),
    "low-memory mode, int8": ("mehl+", {"block_size": 2, "low_memory": True, "directions": "int8"}),
}
BRIEF: dict[str, Any] = {"steps": 6, "batch_size": 16, "lr": 0.05}


class KilledError(Exception):
    pass


class Memory:
    """A store as strict as a directory: tensors go through safetensors, which refuses shared memory,
    and values through JSON without NaN or infinity."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.peaks: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.state: tuple[dict[str, Tensor], str] | None = None

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if self.state is None:
            return None
        return {name: tensor.clone() for name, tensor in self.state[0].items()}, json.loads(self.state[1])

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any], part: int | None = None) -> None:
        written = save({n: x.contiguous() for n, x in tensors.items()})
        self.state = (load(written), json.dumps(values, allow_nan=False))


class Killer:
    """Raises at the n-th step or held-out evaluation, counted over all attempts."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.seen = 0

    def __call__(self, event: Event) -> None:
        if event.kind in ("step", "held_out"):
            self.seen += 1
            if self.seen == self.at:
                raise KilledError


def attempt(pool: Pool, task: Task, variant: str, store: Memory | None, listen: Killer) -> Result:
    method, given = VARIANTS[variant]
    return decide(pool, task, method, store=store, listen=listen, **{**BRIEF, **given})


def same(first: Result, second: Result) -> None:
    assert isinstance(first.soup, Soup)
    assert isinstance(second.soup, Soup)
    assert torch.equal(first.soup.W, second.soup.W)
    assert first.soup.about == second.soup.about  # beta, where it was learned
    assert [dict(h) for h in first.history] == [dict(h) for h in second.history]


@pytest.mark.parametrize("interval", [-1.0, float("inf")], ids=["saved at every step", "saved after blocks"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_equals_uninterrupted(tmp_path: Path, variant: str, interval: float) -> None:
    pool, task = zoo(tmp_path, 5)
    watch = Killer()
    whole = attempt(pool, task, variant, None, watch)
    for at in (1, 2, watch.seen // 2, watch.seen - 1, watch.seen):
        store = Memory(interval)
        with pytest.raises(KilledError):
            attempt(pool, task, variant, store, Killer(at))
        rest = Killer()
        same(whole, attempt(pool, task, variant, store, rest))
        if interval < 0 and at > 2:
            assert rest.seen <= watch.seen - at + 2  # it did not start over (an evaluation may be repeated)


@pytest.mark.parametrize(
    ("changed", "gone", "found"),
    [
        ({"seed": 1}, None, "seed 0, now 1"),
        ({}, "settings", "batch_size None, now 16"),
        ({}, "format", "expected format 2, that of this version, found none"),
    ],
)
def test_what_was_learned_one_way_is_not_continued_in_another(
    tmp_path: Path, changed: dict[str, Any], gone: str | None, found: str
) -> None:
    pool, task = zoo(tmp_path, 5)
    method, given = VARIANTS["many ways back"]
    store = Memory(-1.0)
    with pytest.raises(KilledError):
        decide(pool, task, method, store=store, listen=Killer(9), **{**BRIEF, **given})
    assert store.state is not None
    if gone is not None:  # as before it was saved
        values = json.loads(store.state[1])
        del values[gone]
        store.state = (store.state[0], json.dumps(values))
    before = store.state
    with pytest.raises(RunError) as caught:
        decide(pool, task, method, store=store, **{**BRIEF, **given, **changed})
    assert found in str(caught.value)
    assert "--overwrite" in str(caught.value)
    assert store.state is before


@pytest.mark.parametrize("variant", ["blocks", "many ways back", "as the authors do it"])
def test_at_every_yield(tmp_path: Path, variant: str) -> None:
    """Killed at each step and each judgement in turn."""
    pool, task = zoo(tmp_path, 4)
    watch = Killer()
    whole = attempt(pool, task, variant, None, watch)
    for at in range(1, watch.seen + 1):
        store = Memory(-1.0)
        with pytest.raises(KilledError):
            attempt(pool, task, variant, store, Killer(at))
        same(whole, attempt(pool, task, variant, store, Killer()))


def test_the_saved_state_is_small_whatever_happened_before(tmp_path: Path) -> None:
    """Its JSON part, which becomes a file's header, does not grow with the steps that were taken."""
    pool, task = zoo(tmp_path, 4)
    sizes = []
    for steps in (5, 80):
        store = Memory(-1.0)
        decide(pool, task, "mehl+", store=store, steps=steps, batch_size=16, block_size=2)
        assert store.state is not None
        assert len(store.state[0]["history"]) == 2 * steps
        sizes.append(len(store.state[1]))
    assert abs(sizes[1] - sizes[0]) < 10


def test_killed_again_and_again(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    variant = "folds, guard, early stopping"
    whole = attempt(pool, task, variant, None, Killer())
    store = Memory(-1.0)
    for _ in range(200):
        try:
            result = attempt(pool, task, variant, store, Killer(4))
            break
        except KilledError:
            continue
    same(whole, result)


def test_a_finished_run_is_not_learned_again(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    store = Memory(float("inf"))
    whole = attempt(pool, task, "blocks", store, Killer())
    watch = Killer()
    same(whole, attempt(pool, task, "blocks", store, watch))
    assert watch.seen == 0


def test_a_loss_that_draws_random_numbers_is_resumed_too(tmp_path: Path) -> None:
    def noisy(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x + 0.3 * torch.randn_like(x)), y)

    pool, _ = zoo(tmp_path, 5)
    task = Task(mlp(), copy.copy(zoo(tmp_path / "again")[1].fit), loss=noisy)
    whole = attempt(pool, task, "blocks", None, Killer())
    store = Memory(-1.0)
    with pytest.raises(KilledError):
        attempt(pool, task, "blocks", store, Killer(9))
    torch.manual_seed(77)
    same(whole, attempt(pool, task, "blocks", store, Killer()))


def test_batch_statistics_do_not_stand_in_the_way(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4, build=normed)
    whole = attempt(pool, task, "folds, guard, early stopping", None, Killer())
    store = Memory(-1.0)
    with pytest.raises(KilledError):
        attempt(pool, task, "folds, guard, early stopping", store, Killer(11))
    same(whole, attempt(pool, task, "folds, guard, early stopping", store, Killer()))


class Noisy(nn.Module):
    """Draws random numbers whatever its mode is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x + 0.5 * torch.randn_like(x))
        return out


def test_a_model_that_is_random_when_it_is_evaluated_is_resumed_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stockpot.run.state.INTERVAL", 0.0)
    pool, _ = zoo(tmp_path / "pool", 3, build=Noisy)
    data = zoo(tmp_path / "again")[1].fit
    seen = 0

    def kill(event: Event) -> None:
        nonlocal seen
        seen += event.kind == "step"
        if seen == 7:
            raise KeyboardInterrupt

    def cooked(name: str, listen: Callable[[Event], None]) -> Any:
        torch.manual_seed(len(name))  # the process's own numbers are others each time
        task = Task(Noisy(), copy.copy(data))
        return cook(pool, task, "crossfit", run=tmp_path / name, steps=5, folds=2, listen=listen)

    whole = cooked("whole", lambda event: None)
    with pytest.raises(KeyboardInterrupt):
        cooked("killed", kill)
    resumed = cooked("killed", lambda event: None)
    assert torch.equal(whole.soup.W, resumed.soup.W)
    assert torch.equal(whole.fit.table, resumed.fit.table)
    assert whole.held_out.value == resumed.held_out.value
