"""The task: loss, metric, evaluation, and the seal on the report data."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from stockpot.errors import TaskError
from stockpot.events import Event
from stockpot.task import Data, Task
from stockpot.task.sealed import Sealed, open_report

from .models import Encoder, Plain, blobs, linear, normalised

X, Y = blobs()
ROWS = torch.arange(60)


def test_ten_lines() -> None:
    model = nn.Linear(4, 3)
    task = Task(model, fit=TensorDataset(X, Y), report=(X[:30], Y[:30]))
    scores = task.score()
    right = (model(X).argmax(1) == Y).double()
    assert scores.values.equal(right)
    assert scores.values.dtype == torch.float64
    assert scores.mean == pytest.approx(float(right.mean()))
    assert scores.loss == pytest.approx(float(functional.cross_entropy(model(X), Y).detach()))
    assert scores.complete
    assert scores.n == 60


# Loss


def test_default_loss_is_cross_entropy() -> None:
    model = linear()
    task = Task(model, (X, Y))
    batch = task.fit.batch(ROWS[:16])
    assert task.loss(batch).equal(functional.cross_entropy(model(X[:16]), Y[:16]))
    smoothed = functional.cross_entropy(model(X[:16]) * 2.5, Y[:16], label_smoothing=0.1)
    assert task.loss(batch, label_smoothing=0.1, temperature=torch.tensor(2.5)).equal(smoothed)


def test_temperature_gets_a_gradient() -> None:
    task = Task(linear(), (X, Y))
    temperature = torch.tensor(1.0, requires_grad=True)
    loss = task.loss((X, Y), temperature=temperature)
    (gradient,) = torch.autograd.grad(loss, temperature)
    assert float(gradient) != 0


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda logits: logits, id="tensor"),
        pytest.param(lambda logits: SimpleNamespace(logits=logits), id="object"),
        pytest.param(lambda logits: {"logits": logits, "hidden": None}, id="dict"),
        pytest.param(lambda logits: (logits, None), id="tuple"),
    ],
)
@pytest.mark.parametrize("batch", [(X, Y), {"inputs": X, "labels": Y}, {"inputs": X, "y": Y}])
def test_logits_are_found_in_any_output(wrap: Any, batch: Any) -> None:
    model = Plain(wrap)
    task = Task(model, batch)
    expected = functional.cross_entropy(model.net(X), Y)
    assert task.loss(task.fit.batch(ROWS)).equal(expected)
    assert task.logits(batch).equal(model.net(X))
    assert task.score().mean == pytest.approx(float((model.net(X).argmax(1) == Y).double().mean()))


def test_the_models_own_loss_is_used_for_dicts() -> None:
    model = Encoder(weight=3.0)
    batch = {"inputs": X, "labels": Y}
    task = Task(model, batch)
    plain = functional.cross_entropy(model.net(X), Y)
    assert task.loss(batch).equal(3 * plain)
    assert task.score().loss == pytest.approx(3 * float(plain.detach()))
    # Smoothing and temperature need the logits, so then the loss is ours.
    assert task.loss(batch, temperature=torch.tensor(1.0)).equal(plain)


def test_nested_inputs_are_positional_or_keyword_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = linear()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.net(a - b)
            return out

    model = Two()
    expected = functional.cross_entropy(model.net(X - 1), Y)
    for inputs in ((X, torch.ones_like(X)), {"b": torch.ones_like(X), "a": X}):
        task = Task(model, (inputs, Y))
        assert task.loss(task.fit.batch(ROWS)).equal(expected)


def test_a_loss_of_ones_own() -> None:
    model = nn.Linear(4, 4)
    task = Task(
        model, (X,), loss=lambda model, batch: (model(batch[0]) - batch[0]).square().mean(), metric="loss"
    )
    expected = (model(X) - X).square().mean()
    assert task.loss(task.fit.batch(ROWS)).equal(expected)
    scores = task.score()
    assert scores.mean == pytest.approx(-float(expected.detach()))
    assert scores.loss == pytest.approx(float(expected.detach()))
    for options in ({"label_smoothing": 0.1}, {"temperature": torch.tensor(1.0)}):
        with pytest.raises(
            TaskError, match="expected the default loss, whose logits are known, found a loss of"
        ):
            task.loss((X,), **options)


@pytest.mark.parametrize(
    ("dtype", "autocast", "expected"),
    [
        (torch.float64, None, torch.float64),
        (torch.bfloat16, None, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_the_loss_is_single_precision_or_better(
    dtype: torch.dtype, autocast: torch.dtype | None, expected: torch.dtype
) -> None:
    for model, data in ((linear(), (X.to(dtype), Y)), (Encoder(), {"inputs": X.to(dtype), "labels": Y})):
        task = Task(model.to(dtype), data, autocast=autocast)
        assert task.loss(task.fit.batch(ROWS)).dtype == expected


def test_autocast_reaches_the_model_and_a_loss_of_ones_own() -> None:
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out: Tensor = model(batch[0])
        seen.append(out.dtype)
        return out.mean()

    Task(linear(), (X, Y), loss=loss, autocast=torch.bfloat16).loss((X, Y))
    assert seen == [torch.bfloat16]


def test_labels_of_any_integer_type_and_class_probabilities() -> None:
    model = linear()
    expected = functional.cross_entropy(model(X), Y)
    probabilities = functional.one_hot(Y, 3).float()
    for labels in (Y.int(), Y.to(torch.uint8), probabilities):
        task = Task(model, (X, labels))
        assert float(task.loss((X, labels)).detach()) == pytest.approx(float(expected.detach()))
        assert task.score().mean == Task(model, (X, Y)).score().mean


# Metric and evaluation


def test_metric_loss_is_minus_the_loss_of_each_sample() -> None:
    model = linear()
    scores = Task(model, (X, Y), metric="loss", batch_size=7).score()
    expected = -functional.cross_entropy(model(X), Y, reduction="none").detach()
    torch.testing.assert_close(scores.values, expected.double())
    assert scores.loss == pytest.approx(-scores.mean)
    assert scores.batches is None


def test_a_loss_known_per_batch_only_is_repeated_and_says_so() -> None:
    model = Encoder()
    scores = Task(model, {"inputs": X, "labels": Y}, metric="loss", batch_size=25).score()
    parts = [functional.cross_entropy(model.net(x), y) for x, y in zip(X.split(25), Y.split(25), strict=True)]  # type: ignore[no-untyped-call]
    assert scores.values[[0, 24, 25, 59]].tolist() == pytest.approx(
        [-float(parts[i].detach()) for i in (0, 0, 1, 2)]
    )
    assert scores.batches == (25, 25, 10)


def test_a_metric_of_ones_own_per_sample_or_mean() -> None:
    model = Encoder()
    batch = {"inputs": X, "labels": Y}
    each = Task(model, batch, metric=lambda out, b: -(out.logits[:, 0] - b["labels"]).abs(), batch_size=25)
    expected = -(model.net(X)[:, 0] - Y).abs().detach().double()
    torch.testing.assert_close(each.score().values, expected)
    assert each.metric_max is None
    mean = Task(model, batch, metric=lambda out, b: float(out.logits.shape[0]), batch_size=25).score()
    assert mean.values.tolist() == [25.0] * 50 + [10.0] * 10
    assert mean.batches == (25, 25, 10)


def test_a_metric_of_the_wrong_shape() -> None:
    task = Task(linear(), (X, Y), metric=lambda out, b: out)
    with pytest.raises(
        TaskError, match=r"metric: expected one score per sample, shape \(60,\), .* \(60, 3\)"
    ):
        task.score()


def test_without_a_known_loss_the_loss_is_nan() -> None:
    task = Task(nn.Linear(4, 4), (X, X), metric=lambda out, b: -(out - b[1]).abs().mean(1))
    assert math.isnan(task.score().loss)
    assert math.isnan(Task(linear(), (X, Y)).score(with_loss=False).loss)


def test_the_metric_needs_logits_but_the_loss_is_the_users() -> None:
    model = linear()
    task = Task(model, (X, Y), loss=lambda m, b: functional.cross_entropy(m(b[0]), b[1]) * 7)
    scores = task.score()
    assert scores.loss == pytest.approx(7 * float(functional.cross_entropy(model(X), Y).detach()))
    assert scores.values.equal((model(X).argmax(1) == Y).double())


def test_nan_is_never_right() -> None:
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, math.nan)
    assert Task(model, (X, torch.zeros(60, dtype=torch.long))).score().mean == 0


def test_dense_labels_are_scored_by_their_share() -> None:
    model = nn.Conv2d(1, 2, 1)
    nn.init.zeros_(model.weight)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([1.0, 0.0]))  # type: ignore[union-attr]
    labels = torch.tensor([[[0, 0], [0, 1]], [[1, -100], [-100, 0]]])
    assert Task(model, (torch.zeros(2, 1, 2, 2), labels)).score().values.tolist() == [0.75, 0.5]


def test_evaluation_follows_the_indices_and_the_data() -> None:
    task = Task(linear(), (X, Y), metric="loss", batch_size=7)
    everything = task.score().values
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(task.score(indices=order).values, everything[order])
    part = task.fit.subset(order[:20])
    torch.testing.assert_close(task.score(part).values, everything[order[:20]])
    torch.testing.assert_close(task.score(part, indices=torch.tensor([3])).values, everything[order[3:4]])


def test_evaluation_can_stop_after_any_batch() -> None:
    task = Task(linear(), (X, Y), batch_size=16)
    seen: list[tuple[float, int]] = []

    def stop(total: float, done: int) -> bool:
        seen.append((total, done))
        return done >= 32

    scores = task.score(stop=stop)
    assert not scores.complete
    assert scores.n == 32
    assert [done for _, done in seen] == [16, 32]
    assert seen[-1][0] == float(scores.values.sum())
    assert task.score(stop=lambda total, done: False).complete
    assert task.metric_max == 1.0


def test_scoring_is_in_evaluation_mode_and_leaves_modes_alone() -> None:
    model = normalised()
    model.train()
    model[1].eval()  # type: ignore[index]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task = Task(model, (X, Y))
    assert task.score().loss == task.score().loss  # dropout would differ
    assert [module.training for module in model.modules()] == [True, True, False, True, True, True]
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    with task.evaluating():
        assert not task.loss((X, Y)).requires_grad
    with pytest.raises(KeyError), task.evaluating():
        raise KeyError
    assert model.training


# Logits from elsewhere


def test_scoring_given_logits() -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0]])
    batch = (X[:2], torch.tensor([0, 2]))
    task = Task(linear(), (X, Y))
    assert task.scoring_logits(logits, batch).tolist() == [1.0, 0.0]
    task = Task(linear(), (X, Y), metric="loss")
    expected = -functional.cross_entropy(logits, batch[1], reduction="none")
    assert task.scoring_logits(logits, batch).equal(expected)
    task = Task(linear(), (X, Y), metric=lambda out, b: out[:, 0])
    assert task.scoring_logits(logits, batch).tolist() == [5.0, 0.0]


def test_scoring_given_logits_needs_a_metric_of_logits() -> None:
    own = Task(linear(), (X, Y), metric="loss", loss=lambda m, b: m(b[0]).mean())
    with pytest.raises(TaskError, match="found a loss of your own calls the model itself"):
        own.scoring_logits(torch.zeros(60, 3), (X, Y))
    task = Task(Encoder(), {"inputs": X, "labels": Y}, metric=lambda out, b: out.logits[:, 0])
    with pytest.raises(TaskError, match=r"does not take a tensor of logits \(AttributeError"):
        task.scoring_logits(torch.zeros(60, 3), {"labels": Y})


def test_a_model_without_logits() -> None:
    task = Task(Plain(lambda logits: None), (X, Y), loss=lambda model, batch: batch[0].mean())
    with pytest.raises(
        TaskError, match=r"model output for logits: expected a tensor, an object with \.logits"
    ):
        task.logits((X, Y))


def test_the_ensemble_is_the_mean_of_logits() -> None:
    model = linear()
    states = [linear(seed=seed).state_dict() for seed in range(3)]
    task = Task(model, (X, Y), metric="loss", batch_size=16)
    logits = []
    for state in states:
        model.load_state_dict(state)
        logits.append(model(X).detach())
    expected = -functional.cross_entropy(torch.stack(logits).mean(0), Y, reduction="none").double()

    def members() -> Any:
        for k, state in enumerate(states):
            model.load_state_dict(state)
            yield k

    torch.testing.assert_close(task.ensemble_scores(members()).values, expected)
    ten = Data.of((X[:10], Y[:10]))
    torch.testing.assert_close(task.ensemble_scores(members(), ten).values, expected[:10])


# Report data


def test_no_public_name_of_a_task_gives_the_report_data_away() -> None:
    held = blobs(30, seed=5)
    task = Task(linear(), (X, Y), report=held)
    assert task.has_report
    public = {name: getattr(task, name) for name in dir(task) if not name.startswith("_")}
    assert [name for name, value in public.items() if isinstance(value, (Data, Sealed))] == ["fit"]
    seal = task._sealed
    assert isinstance(seal, Sealed)
    assert [name for name in dir(seal) if not name.startswith("_")] == [
        "check_may_decide", "fingerprint", "open", "opened",
    ]  # fmt: skip
    assert not hasattr(seal, "__dict__")


def test_the_seal_is_broken_for_good() -> None:
    events: list[Event] = []
    task = Task(linear(), (X, Y), report=blobs(30, seed=5))
    task.check_may_decide("anything")
    data = open_report(task, ["a", "b"])
    assert len(data) == 30
    assert task.score(data, listen=events.append).n == 30
    assert events[-1].data["done"] == 30
    assert open_report(task, ["b"]) is data  # what was decided before may be scored again
    task.check_may_decide("a")
    for again in (lambda: task.check_may_decide("c"), lambda: open_report(task, ["a", "c"])):
        with pytest.raises(
            TaskError, match="a new decision, although it was looked at for 2 earlier ones"
        ) as e:
            again()
        assert "Fix: decide everything first: compare(pool, task, [...])" in str(e.value)
    with pytest.raises(TaskError, match="a new decision"):
        copy.deepcopy(task).check_may_decide("c")  # a copy remembers


def test_without_report_data_there_are_no_report_scores() -> None:
    task = Task(linear(), (X, Y))
    assert not task.has_report
    task.check_may_decide("anything")
    with pytest.raises(TaskError, match=r"report scores: expected a task with report data, found none"):
        open_report(task, [])


def test_the_memory_limit_holds_for_both_data_together() -> None:
    nbytes = Data.of((X, Y)).nbytes
    Task(linear(), (X, Y), (X, Y), memory_limit=2 * nbytes)
    with pytest.raises(TaskError, match=r"report data: expected at most .* of it in use by other data\)"):
        Task(linear(), (X, Y), (X, Y), memory_limit=2 * nbytes - 1)


# Placement


def test_the_model_and_batches_go_to_the_device() -> None:
    task = Task(linear(), (X, {"y": [Y]}), device="cpu", loss=lambda m, b: m(b[0]).mean())
    assert task.device == torch.device("cpu")
    batch = task.to_device(task.fit.batch(torch.tensor([4])))
    assert batch[0].equal(X[4:5])
    assert batch[1]["y"][0].equal(Y[4:5])
