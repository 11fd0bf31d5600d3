"""Bad numbers while learning: the step is skipped without a trace; too many lead back to the best, at half the rate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_method_resume import KilledError, Memory
from torch import Tensor, nn

from stockpot import Event, Soup, Task, cook
from stockpot.engine import Descent, Directions
from stockpot.errors import LearningError, MethodError
from stockpot.pool import Pool
from stockpot.soups.best import Point
from stockpot.soups.setbacks import HALVINGS, IN_A_ROW, Setbacks, notes
from stockpot.soups.settings import settings_for
from zoo import fine_tunes, learning, marked, mlp, samples, write, zoo


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
        return spoilt(loss, self.how)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [dict(event.data) for event in self.events if event.kind == kind]


def spoilt(loss: Tensor, how: str) -> Tensor:
    if how == "slope":
        return loss + 0 * (loss - loss.detach()).sqrt()  # finite itself; the slope of the root at zero is not
    if how == "steep":
        return loss + (loss - loss.detach()) * 1e25  # a finite slope whose square overflows
    return loss * float(how)


def scripted(folder: Path, script: Script, method: str = "hl+", **settings: Any) -> Soup:
    pool, task = write(folder, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=script.loss)
    options = {"steps": 40, "batch_size": 16, "lr": 0.05, **settings}
    result = cook(pool, task, method, listen=script.listen, **options)
    assert result.soup is not None
    return result.soup


# One step.


@contextmanager
def descending(folder: Path, how: list[str], **settings: Any) -> Iterator[Descent]:
    """A descent whose loss does what the last word of `how` says."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if how[-1] == "blind":
            return torch.stack([p.nan_to_num().clamp(-1, 1).sum() for p in model.parameters()]).sum()
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return spoilt(value, how[-1]) if how[-1] else value

    pool, task = write(folder, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=loss)
    chosen = settings_for("hl+", schedule="constant", lr=0.05, **settings)
    with learning(pool, task, "hl+") as learner, task.learning():
        live = learner.live
        mean = live.mean()
        rows = torch.stack([live.read(k, out=torch.empty_like(mean)) - mean for k in range(4)])
        yield Descent(
            live, Directions(rows, live.plan), mean, torch.zeros(4, len(live.layout)), None, chosen, 9
        )


@pytest.mark.parametrize("how", ["nan", "inf", "-inf", "slope", "steep"])
@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "sgd", "momentum": 0.9}, {"clip": 0.1}, {"accumulate": 2}], ids=str
)
def test_a_skipped_step_leaves_no_trace(tmp_path: Path, how: str, settings: dict[str, Any]) -> None:
    batches = [torch.arange(16), torch.arange(16, 32), torch.arange(32, 48)]

    def walk(folder: Path, bad_at: int | None) -> dict[str, Tensor]:
        mode = [""]
        with descending(folder, mode, **settings) as descent:
            for number, batch in enumerate(batches):
                if number == bad_at:
                    mode.append(how)
                    (step,) = descent.run(descent.live.task.fit, [batch])
                    assert step.skipped
                    mode.append("")
                (step,) = descent.run(descent.live.task.fit, [batch])
                assert not step.skipped
            return descent.state()[0]

    whole = walk(tmp_path / "whole", None)
    for bad_at in (0, 2):  # also before the optimiser has any moments
        found = walk(tmp_path / str(bad_at), bad_at)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        assert (found["raw"] != 0).any()


def test_half_the_rate_is_half_the_step(tmp_path: Path) -> None:
    found = []
    for factor in (1.0, 0.5):
        with descending(tmp_path / str(factor), [""], optimizer="sgd", weight_decay=0.0) as descent:
            descent.slow(factor)
            descent.run(descent.live.task.fit, [torch.arange(16)])
            found.append(descent.raw.detach().clone())
    assert (found[0] != 0).any()
    assert torch.equal(found[1], found[0] / 2)


def test_coefficients_that_are_not_finite_are_noticed_also_where_the_loss_does_not_see_them(
    tmp_path: Path,
) -> None:
    with descending(tmp_path, ["blind"]) as descent:
        fit = descent.live.task.fit
        assert not descent.run(fit, [torch.arange(16)])[0].skipped
        with torch.no_grad():
            descent.raw[1, 2] = torch.inf
        (step,) = descent.run(fit, [torch.arange(16)])
        assert torch.isfinite(torch.tensor(step.loss))
        assert step.skipped


# A run.


@pytest.mark.parametrize("how", ["nan", "slope"])
def test_a_few_skipped_steps_are_counted_and_said(tmp_path: Path, how: str) -> None:
    script = Script({3, 17, 18, 39}, how)
    pool, task = write(tmp_path, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=script.loss)
    result = cook(pool, task, "hl+", listen=script.listen, steps=40, batch_size=16, lr=0.05)
    found = "loss nan" if how == "nan" else "a gradient that is not finite"
    assert script.of("skipped") == [
        {"block": 0, "fold": 0, "step": step, "of": 40, "found": found} for step in (3, 17, 18, 39)
    ]
    assert len(script.of("step")) == 36
    assert not script.of("setback")
    assert result.notes == ("4 of 40 steps were skipped: their loss or gradient was not finite",)
    assert result.notes[0] in str(result)
    assert result.soup is not None
    assert (result.soup.W - 0.25).abs().max() > 1e-3


def test_ten_in_a_row_lead_back_to_the_best_at_half_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without held-out data: to where the stretch of steps (here 4) with the lowest mean loss began."""
    script = Script(range(22, 22 + IN_A_ROW))
    before: list[Tensor] = []
    returned: list[Tensor] = []
    run, go_back = Descent.run, Descent.go_back

    def watched(self: Descent, *args: Any) -> Any:
        before.append(self.raw.detach().clone())
        return run(self, *args)

    def going_back(self: Descent, raw: Tensor, *args: Any) -> None:
        returned.append(raw.clone())
        go_back(self, raw, *args)

    monkeypatch.setattr(Descent, "run", watched)
    monkeypatch.setattr(Descent, "go_back", going_back)
    scripted(tmp_path, script, schedule="constant", lr=0.3)
    losses = {entry["step"]: entry["loss"] for entry in script.of("step")}
    means = [sum(losses[i] for i in range(start, start + 4)) / 4 for start in range(0, 20, 4)]
    best = 4 * means.index(min(means))
    assert len(returned) == 1
    assert torch.equal(returned[0], before[best])
    assert torch.equal(before[32], before[best])
    rates = {entry["step"]: entry["lr"] for entry in script.of("step")}
    assert rates[21] == 0.3
    assert rates[32] == rates[39] == 0.15
    (setback,) = script.of("setback")
    assert setback["step"] == 32
    assert setback["text"] == (
        "10 skipped, the last with loss nan; back to the best coefficients so far at 0.5 of the learning rate"
    )


def test_with_folds_the_way_back_leads_to_the_best_on_held_out_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(range(25, 25 + IN_A_ROW))
    returned: list[Tensor] = []
    seen: list[tuple[float, Tensor]] = []
    go_back, judged = Descent.go_back, "stockpot.soups.visit.Visit._judged"

    def going_back(self: Descent, raw: Tensor, *args: Any) -> None:
        returned.append(raw.clone())
        go_back(self, raw, *args)

    from stockpot.soups.visit import Visit

    original = Visit._judged

    def watched(self: Visit, raw: Tensor, temperature: float | None) -> Point:
        point = original(self, raw, temperature)
        seen.append((point.loss, raw.clone()))
        return point

    monkeypatch.setattr(Descent, "go_back", going_back)
    monkeypatch.setattr(judged, watched)
    pool, task = write(tmp_path, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=script.loss)
    result = cook(
        pool, task, "crossfit", listen=script.listen,
        folds=2, steps=40, batch_size=16, lr=0.3, schedule="constant", evaluations=8, guard=False,
        retreat=False,
    )  # fmt: skip
    (setback,) = script.of("setback")
    assert (setback["fold"], setback["step"]) == (0, 35)
    assert torch.equal(returned[0], min(seen[:6], key=lambda pair: pair[0])[1])
    assert "10 of 80 steps were skipped" in result.notes[0]
    assert result.notes[1] == (
        "fold 1 went back to its best coefficients 1 time, and on at 0.5 of the learning rate"
    )
    rates = {(entry["fold"], entry["step"]): entry["lr"] for entry in script.of("step")}
    assert rates[0, 39] == 0.15
    assert rates[1, 39] == 0.3  # the other fold had no trouble


def test_a_lower_rate_stays_low_in_the_next_block(tmp_path: Path) -> None:
    script = Script(range(5, 5 + IN_A_ROW))
    scripted(tmp_path, script, "mehl+", block_size=2, schedule="constant")
    rates = {(entry["block"], entry["step"]): entry["lr"] for entry in script.of("step")}
    assert rates[0, 4] == 0.05
    assert rates[1, 0] == 0.025


def test_after_a_few_halvings_learning_gives_up(tmp_path: Path) -> None:
    script = Script(range(25, 10_000))
    with pytest.raises(LearningError) as caught:
        scripted(tmp_path, script, steps=200)
    assert [entry["factor"] for entry in script.of("setback")] == [0.5, 0.25, 0.125]
    assert len(script.of("skipped")) == IN_A_ROW * (HALVINGS + 1)
    text = str(caught.value)
    assert "learning at block 1 of 1, step 65: expected steps whose loss and gradient are finite" in text
    assert "found 10 skipped, the last with loss nan, also at 0.125 of the learning rate" in text
    assert "Fix: lower lr, look for what the loss cannot take" in text
    assert isinstance(caught.value.best, Soup)
    assert bool(caught.value.best.W.isfinite().all())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("lr", [1e3, 1e10, 1e30])
def test_coefficients_that_explode_are_never_saved(tmp_path: Path, lr: float, optimizer: str) -> None:
    """Descent at an absurd rate overflows; what comes back is finite, or an error of ours."""
    pool, task = write(tmp_path, fine_tunes(mlp, 4)), Task(mlp(), samples())
    options: dict[str, Any] = {"steps": 60, "batch_size": 16, "optimizer": optimizer, "schedule": "constant"}
    soup: Soup | None = None
    try:
        soup = cook(pool, task, "hl+", lr=lr, store=Strict(-1.0), **options).soup
    except LearningError as error:
        soup = error.best
    assert isinstance(soup, Soup)
    assert bool(soup.W.isfinite().all())


def test_a_rate_without_end_is_refused(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    for lr in (1e31, float("inf")):
        with pytest.raises(
            MethodError, match=rf"setting lr: expected at most 1e\+30, found {re.escape(str(lr))}"
        ):
            cook(pool, task, "hl+", lr=lr)


# The same on every device, and after every kill.


TROUBLED: dict[str, dict[str, Any]] = {  # with one marked sample: some steps skipped, one or two setbacks
    "mehl+": {"steps": 150, "batch_size": 4, "lr": 0.05, "block_size": 2},
    "crossfit": {
        "steps": 70, "batch_size": 4, "lr": 0.05, "block_size": 2, "folds": 2, "evaluations": 5, "guard": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("method", TROUBLED)
def test_how_many_steps_the_engine_takes_at_once_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A GPU looks at the losses of 50 steps at a time; it must stop, count and go back at the same step."""
    pool = write(tmp_path, fine_tunes(mlp, 4))
    found = []
    for burst in (1, 7, 50):
        monkeypatch.setattr(Descent, "burst", burst)
        result = cook(pool, marked(1), method, **TROUBLED[method])
        assert result.soup is not None
        found.append(result)
    assert sum(h["kind"] == "skipped" for h in found[0].history) > 10
    assert any(h["kind"] == "setback" for h in found[0].history)
    for other in found[1:]:
        assert other.soup is not None
        assert found[0].soup is not None
        assert torch.equal(found[0].soup.W, other.soup.W)
        assert found[0].history == other.history
        assert found[0].notes == other.notes


class Strict(Memory):
    def save(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
        super().save(tensors, values)


def killed(pool: Pool, at: int | None, store: Memory | None, method: str) -> Any:
    seen = 0

    def listen(event: Event) -> None:
        nonlocal seen
        seen += event.kind in ("step", "skipped", "setback", "held_out")
        if seen == at:
            raise KilledError

    result = cook(pool, marked(1), method, store=store, listen=listen, **TROUBLED[method])
    return result, seen


@pytest.mark.parametrize("interval", [-1.0, float("inf")], ids=["saved at every step", "saved after blocks"])
@pytest.mark.parametrize("method", TROUBLED)
def test_resumed_equals_uninterrupted_with_setbacks(tmp_path: Path, method: str, interval: float) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 4))
    whole, count = killed(pool, None, None, method)
    kinds = [h["kind"] for h in whole.history]
    first = kinds.index("setback")
    for at in (first - 3, first + 1, first + 2, count - 1):
        store = Strict(interval)
        with pytest.raises(KilledError):
            killed(pool, at, store, method)
        again, _ = killed(pool, None, store, method)
        assert torch.equal(whole.soup.W, again.soup.W)
        assert [dict(h) for h in whole.history] == [dict(h) for h in again.history]
        assert whole.notes == again.notes


# The rules.


def test_when_the_limit_is_reached() -> None:
    row = Setbacks()
    assert [row.count(True) for _ in range(10)] == [False] * 9 + [True]
    broken = Setbacks()
    assert not any(broken.count(number % 10 != 0) for number in range(1, 10))  # nine, then a good one
    assert not broken.count(False)
    assert broken.row == 0
    share = Setbacks()
    found = [share.count(number % 19 == 0) for number in range(1, 400)]
    assert found.index(True) + 1 == 190  # the tenth, 1 in 19 of the steps
    rare = Setbacks()
    assert not any(rare.count(number % 21 == 0) for number in range(1, 2000))


def test_going_back_starts_counting_again_and_ends_after_three_times() -> None:
    setbacks = Setbacks()
    for halvings in range(1, HALVINGS + 1):
        for _ in range(IN_A_ROW):
            setbacks.count(True)
        assert setbacks.go_back()
        assert (setbacks.row, setbacks.lately, setbacks.steps) == (0, 0, 0)
        assert setbacks.factor == 0.5**halvings
    assert not setbacks.go_back()
    assert setbacks.skipped == setbacks.visit == IN_A_ROW * HALVINGS
    assert Setbacks.from_json(setbacks.to_json()) == setbacks


def test_no_setbacks_no_notes(tmp_path: Path) -> None:
    assert notes([Setbacks(), Setbacks()], 100) == ()
    pool, task = zoo(tmp_path)
    assert cook(pool, task, "hl+", steps=3).notes == ()
