"""Bad numbers while learning: such a step changes nothing, and learning stops when half of them were bad."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resuming import KilledError, Memory
from torch import Tensor, nn

from stockpot import Event, Soup, Task, cook
from stockpot.engine import AdamW, Engine
from stockpot.engine.optimiser import with_mean
from stockpot.errors import LearningError, MethodError
from stockpot.pool import Pool
from stockpot.soups import stopping
from zoo import decide, fine_tunes, learning, marked, mlp, samples, weights_of, write, zoo

BRIEF: dict[str, Any] = {"steps": 40, "batch_size": 16, "lr": 0.05}


class Script:
    """A loss that is bad in the chosen steps, counted from the events of a run."""

    def __init__(self, bad: Any, how: str = "nan") -> None:
        self.bad, self.how, self.now = bad, how, 0
        self.events: list[Event] = []

    def listen(self, event: Event) -> None:
        self.events.append(event)
        self.now += event.kind in ("step", "skipped")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if not torch.is_grad_enabled() or self.now not in self.bad:
            return loss
        if self.how == "slope":
            return loss + 0 * (loss - loss.detach()).sqrt()  # finite itself; the slope of the root at zero is not
        if self.how == "steep":
            return loss + (loss - loss.detach()) * 1e25  # a finite slope whose square overflows
        return loss * float(self.how)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [dict(event.data) for event in self.events if event.kind == kind]


# One step.


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("loss", "slope", "of_beta"),
    [(math.nan, 1.0, 1.0), (math.inf, 1.0, 1.0), (1.0, math.nan, 1.0), (1.0, 1e25, 1.0), (1.0, 1.0, math.inf)],
)
def test_a_skipped_step_leaves_no_trace(loss: float, slope: float, of_beta: float) -> None:
    x = AdamW(random(2, 3), 1.5, 0.1)
    rate = torch.tensor(0.1)
    good = (torch.tensor(1.0), random(3, 2).view(2, 3), torch.tensor(0.3))
    for taken in range(3):  # also before there are any moments
        before = x.save()
        found = x.step(torch.tensor(loss), torch.full((2, 3), slope), torch.tensor(of_beta), rate)
        assert found[1] == 1
        after = x.save()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert x.step(*good, rate)[1] == 0
        assert x.count == x.taken == taken + 1


def test_a_step_that_would_overflow_is_not_taken() -> None:
    x = AdamW(torch.full((1, 2), 1e38), None, 0.0)
    assert x.step(torch.tensor(1.0), -torch.ones(1, 2), None, torch.tensor(1e38 * 3))[1] == 1
    assert x.alpha.tolist() == torch.full((1, 2), 1e38).tolist()


def test_the_steps_are_those_of_torch() -> None:
    """A readable twin: torch's own AdamW, with beta in a group without decay."""
    alpha, beta = random(3, 4).double(), 1.2
    ours = AdamW(alpha.clone(), beta, 0.3)
    theirs = [alpha.clone().requires_grad_(), torch.tensor(beta, dtype=torch.float64, requires_grad=True)]
    groups = [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=1.0)
    for i in range(20):
        slope, of_beta = (random(4, 3, 1 + i).double()[..., 0].T.contiguous(), torch.tensor(0.1 * i - 0.7).double())
        theirs[0].grad, theirs[1].grad = slope.clone(), of_beta.clone()
        for group in optimiser.param_groups:
            group["lr"] = 0.1 / (1 + i)
        optimiser.step()
        ours.step(torch.tensor(1.0).double(), slope, of_beta, torch.tensor(0.1 / (1 + i), dtype=torch.float64))
    assert (ours.alpha - theirs[0]).abs().max() <= 1e-14
    assert ours.beta is not None
    assert (ours.beta - theirs[1].detach()).abs() <= 1e-14


def test_the_mean_is_of_the_steps_that_were_taken() -> None:
    x = AdamW(torch.tensor([[1.0, 2.0]]), 3.0, 0.0)
    assert with_mean(x.save())["x"].tolist() == [1.0, 2.0, 3.0]
    seen = []
    for loss in (1.0, math.nan, 1.0):
        skipped = x.step(torch.tensor(loss), torch.ones(1, 2), torch.tensor(1.0), torch.tensor(0.1))[1]
        if not skipped:
            seen.append(x.x.clone())
    saved = x.save()
    assert torch.allclose(with_mean(saved)["x"], torch.stack(seen).mean(dim=0))
    assert saved["taken"] == 0  # the next mean begins here
    assert torch.equal(saved["x"], x.x)


# A run.


@pytest.mark.parametrize("how", ["nan", "slope", "steep"])
def test_a_few_skipped_steps_are_counted_and_said(tmp_path: Path, how: str) -> None:
    script = Script({3, 17, 18, 39}, how)
    pool, task = write(tmp_path, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=script.loss)
    result = cook(pool, task, "hl+", listen=script.listen, **BRIEF)
    found = "loss nan" if how == "nan" else "a gradient that is not finite"
    assert script.of("skipped") == [
        {"block": 0, "fold": 0, "step": step, "of": 40, "found": found} for step in (3, 17, 18, 39)
    ]
    assert len(script.of("step")) == 36
    assert result.notes == ("4 of 40 steps were skipped: their loss or gradient was not finite",)
    assert result.notes[0] in str(result)
    assert (weights_of(result) - 0.25).abs().max() > 1e-3
    assert [h["step"] for h in result.history if h["kind"] == "skipped"] == [3, 17, 18, 39]


@pytest.mark.parametrize(("bad", "word"), [("nan", "nan"), ("inf", "inf")])
def test_learning_stops_when_half_of_a_blocks_steps_were_skipped(tmp_path: Path, bad: str, word: str) -> None:
    script = Script(range(8, 1000), bad)
    pool, task = write(tmp_path / "pool", fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=script.loss)
    settings = {**BRIEF, "steps": 6, "block_size": 2}
    with pytest.raises(LearningError) as caught:
        cook(pool, task, "mehl+", listen=script.listen, **settings)
    text = str(caught.value)
    assert "learning at block 2 of 2, step 6: expected steps whose loss and gradient are finite" in text
    assert "found 4 of 6 skipped." in text
    assert "Fix: lower lr, look for what the loss cannot take" in text
    assert "the best soup so far is in the error's .best" in text
    assert script.of("skipped")[-1]["found"] == f"loss {word}"
    soup = caught.value.best  # what was learned before is not lost
    assert isinstance(soup, Soup)
    assert soup.about["stopped"] == text
    with learning(pool, Task(mlp(), samples()), "mehl+", **settings) as learner:
        first, second = learner.blocks
    whole = weights_of(cook(pool, Task(mlp(), samples()), "mehl+", **{**settings, "blocks": 1}))
    alpha = whole[first] - whole[second].mean(dim=0)  # weights of models that nothing was learned for are equal
    assert alpha.abs().max() > 1e-3
    assert torch.allclose(soup.W[first] - soup.W[first].mean(0), whole[first] - whole[first].mean(0), atol=1e-5)
    assert torch.equal(Soup.load(soup.save(tmp_path / "soup")).W, soup.W)


def test_with_folds_it_says_which_and_keeps_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "EVERY", 1)
    script = Script(range(6, 1000))
    pool, task = write(tmp_path, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=script.loss)
    with pytest.raises(LearningError, match=r"learning at block 2 of 2, step \d, fold 1") as caught:
        cook(pool, task, "mehl+", listen=script.listen, **{**BRIEF, "steps": 6, "folds": 2, "block_size": 2})
    assert isinstance(caught.value.best, Soup)
    assert bool(caught.value.best.W.isfinite().all())


@pytest.mark.parametrize("lr", [1e3, 1e10, 1e30])
def test_coefficients_that_explode_are_never_saved(tmp_path: Path, lr: float) -> None:
    """Descent at an absurd rate overflows; what comes back is finite, or an error of ours."""
    pool, task = write(tmp_path, fine_tunes(mlp, 4)), Task(mlp(), samples())
    try:
        soup = decide(pool, task, "hl+", store=Strict(-1.0), **{**BRIEF, "lr": lr}).soup
    except LearningError as error:
        soup = error.best
    assert isinstance(soup, Soup)
    assert bool(soup.W.isfinite().all())


def test_a_rate_without_end_is_refused() -> None:
    pool: Any = None
    for lr in (1e31, float("inf")):
        with pytest.raises(MethodError, match="setting lr: expected at least 0 and at most 1e"):
            cook(pool, pool, "hl+", lr=lr)


def test_a_held_out_loss_that_is_not_finite_is_never_the_best_and_is_plain_json(tmp_path: Path) -> None:
    def odd(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss if torch.is_grad_enabled() else loss * float("nan")

    pool, task = write(tmp_path, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=odd)
    result = cook(pool, task, "hl+", **{**BRIEF, "folds": 2})
    assert torch.equal(weights_of(result), torch.full_like(weights_of(result), 0.25))
    assert {h["loss"] for h in result.history if h["kind"] == "held_out"} == {None}


# The same however many steps are taken at once, and after every kill.

TROUBLED: dict[str, dict[str, Any]] = {  # one marked sample in 48
    "mehl+": {"steps": 60, "batch_size": 4, "lr": 0.05, "block_size": 2},
    "crossfit": {"steps": 60, "batch_size": 4, "lr": 0.05, "block_size": 2, "folds": 2},
}


@pytest.mark.parametrize("method", TROUBLED)
def test_how_many_steps_are_taken_at_once_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A GPU looks at the losses of 50 steps at a time; it must count, judge and stop at the same ones."""
    pool = write(tmp_path, fine_tunes(mlp, 4))
    found = []
    for burst in (1, 7, 50):
        monkeypatch.setattr(Engine, "burst", burst)
        found.append(cook(pool, marked(1), method, **TROUBLED[method]))
    assert sum(h["kind"] == "skipped" for h in found[0].history) > 3
    for other in found[1:]:
        assert torch.equal(weights_of(found[0]), weights_of(other))
        assert found[0].history == other.history
        assert found[0].notes == other.notes


class Strict(Memory):
    def save(self, tensors: dict[str, Tensor], values: dict[str, Any], part: int | None = None) -> None:
        numbers = {name: tensor for name, tensor in tensors.items() if name != "history"}  # which has losses
        assert all(bool(tensor.isfinite().all()) for tensor in numbers.values())
        super().save(tensors, values)


def killed(pool: Pool, at: int | None, store: Memory | None, method: str) -> Any:
    seen = 0

    def listen(event: Event) -> None:
        nonlocal seen
        seen += event.kind in ("step", "skipped", "held_out")
        if seen == at:
            raise KilledError

    result = decide(pool, marked(1), method, store=store, listen=listen, **TROUBLED[method])
    return result, seen


@pytest.mark.parametrize("interval", [-1.0, float("inf")], ids=["saved at every step", "saved after blocks"])
@pytest.mark.parametrize("method", TROUBLED)
def test_resumed_equals_uninterrupted_with_skipped_steps(tmp_path: Path, method: str, interval: float) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 4))
    whole, count = killed(pool, None, None, method)
    kinds = [h["kind"] for h in whole.history]
    first = kinds.index("skipped")
    for at in (first, first + 1, first + 2, count - 1):
        store = Strict(interval)
        with pytest.raises(KilledError):
            killed(pool, at, store, method)
        again, _ = killed(pool, None, store, method)
        assert torch.equal(weights_of(whole), weights_of(again))
        assert [dict(h) for h in whole.history] == [dict(h) for h in again.history]
        assert whole.notes == again.notes


# A score that is no number.


def test_a_score_that_is_no_number_never_wins(tmp_path: Path) -> None:
    """The ingredient that scores highest, apart from one without a score."""
    states = fine_tunes(mlp, 4)
    states[1]["2.bias"][0] = 1e4  # marks it: its logits are huge
    pool = write(tmp_path, states)

    def metric(outputs: Tensor, batch: Any) -> Tensor:
        right = (outputs.argmax(dim=1) == batch[1]).double()
        return torch.where(outputs.abs().amax() > 1e3, torch.full_like(right, torch.nan), right)

    task = Task(mlp(), samples(), metric=metric)
    own = [float(value) for value in cook(pool, task, "best").soup.W[:, 0]]  # type: ignore[union-attr]
    assert own[1] == 0
    for method in ("greedy", "crossfit"):
        settings: dict[str, Any] = {} if method == "greedy" else {"folds": 2, "steps": 4}
        result = cook(pool, task, method, **settings)
        assert result.fit is not None
        assert math.isfinite(result.fit.value)


def test_no_score_at_all_is_said(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path)
    score = 1.0  # a metric that is NaN from the first sample on is refused by the task already
    task = Task(mlp(), samples(), metric=lambda outputs, batch: torch.full((len(batch[1]),), score))
    score = torch.nan
    with pytest.raises(LearningError, match="scores of the ingredients: expected a number for at least one, found NaN"):
        cook(pool, task, "best")
