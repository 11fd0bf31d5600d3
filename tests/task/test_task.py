"""The task: loss, metric, evaluation, and the seal on the report data."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from stockpot.errors import EnsembleError, TaskError
from stockpot.events import Event
from stockpot.soups.result import report_weights
from stockpot.task import METRICS, Data, Metric, Task
from stockpot.task.data import Sealed
from stockpot.task.task import open_report

from .models import Encoder, Plain, blobs, linear, normalised

X, Y = blobs()
ROWS = torch.arange(60)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)


def test_ten_lines() -> None:
    model = nn.Linear(4, 3)
    task = Task(model, fit=TensorDataset(X, Y), report=(X[:30], Y[:30]))
    scores = task.score()
    right = (model(X).argmax(1) == Y).double()
    assert scores.table[:, 0].equal(right)
    assert scores.table.dtype == torch.float64
    assert scores.value == pytest.approx(float(right.mean()))
    assert scores.loss == pytest.approx(float(functional.cross_entropy(model(X), Y).detach()))
    assert scores.complete
    assert scores.n == 60


# Loss


def test_default_loss_is_cross_entropy() -> None:
    model = linear()
    task = Task(model, (X, Y))
    batch = task.fit.batch(ROWS[:16])
    close(task.loss(batch).total, functional.cross_entropy(model(X[:16]), Y[:16], reduction="sum"))
    assert float(task.loss(batch).weight) == 16
    smoothed = functional.cross_entropy(model(X[:16]) * 2.5, Y[:16], label_smoothing=0.1)
    close(task.loss(batch, label_smoothing=0.1, beta=torch.tensor(2.5)).mean, smoothed)


def test_beta_gets_a_gradient() -> None:
    task = Task(linear(), (X, Y))
    assert task.can_scale_logits
    beta = torch.tensor(1.0, requires_grad=True)
    loss = task.loss((X, Y), beta=beta)
    assert not loss.weight.requires_grad
    (gradient,) = torch.autograd.grad(loss.mean, beta)
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
    close(task.loss(task.fit.batch(ROWS)).mean, expected)
    assert task.logits(batch).equal(model.net(X))
    assert task.score().value == pytest.approx(float((model.net(X).argmax(1) == Y).double().mean()))


def test_the_models_own_loss_is_used_for_dicts() -> None:
    model = Encoder(weight=3.0)
    batch = {"inputs": X, "labels": Y}
    task = Task(model, batch)
    plain = functional.cross_entropy(model.net(X), Y)
    close(task.loss(batch).mean, 3 * plain)
    assert task.score().loss == pytest.approx(3 * float(plain.detach()))
    # Smoothing and beta need the logits, so then the loss is ours.
    close(task.loss(batch, beta=torch.tensor(1.0)).mean, plain)


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
        close(task.loss(task.fit.batch(ROWS)).mean, expected)


def test_a_loss_of_ones_own() -> None:
    model = nn.Linear(4, 4)
    task = Task(model, (X,), loss=lambda model, batch: (model(batch[0]) - batch[0]).square().mean(1), metric="loss")
    expected = (model(X) - X).square().mean()
    close(task.loss(task.fit.batch(ROWS)).mean, expected)
    scores = task.score()
    assert scores.value == pytest.approx(-float(expected.detach()))
    assert not task.can_scale_logits
    assert scores.loss == pytest.approx(float(expected.detach()))
    for options in ({"label_smoothing": 0.1}, {"beta": torch.tensor(1.0)}):
        with pytest.raises(TaskError, match="expected the default loss, whose logits are known, found a loss of"):
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
        assert [part.dtype for part in task.loss(task.fit.batch(ROWS))] == [expected] * 2


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
        assert float(task.loss((X, labels)).mean.detach()) == pytest.approx(float(expected.detach()))
        assert task.score().value == Task(model, (X, Y)).score().value


# Metric and evaluation


def test_metric_loss_is_minus_the_loss_of_each_sample() -> None:
    model = linear()
    expected = -functional.cross_entropy(model(X), Y, reduction="none").detach().double()
    batch = {"inputs": X, "labels": Y}
    for data, judged in (((X, Y), model), (batch, Encoder())):  # the latter computes one loss for a batch
        judged.load_state_dict({f"net.{k}" if judged is not model else k: v for k, v in model.state_dict().items()})
        task = Task(judged, data, metric="loss", batch_size=7)
        assert task.metric.is_mean
        scores = task.score()
        torch.testing.assert_close(scores.table[:, 0], expected)
        assert scores.loss == pytest.approx(-scores.value)


def test_a_loss_of_a_whole_batch_is_no_metric() -> None:
    """One number for a batch has neither an interval nor a value that is free of the batch size."""
    whole: Any = {"loss": lambda m, b: functional.cross_entropy(m(b[0]), b[1])}
    for model, data, options in ((linear(), (X, Y), whole), (Encoder(weight=3.0), {"inputs": X, "labels": Y}, {})):
        with pytest.raises(TaskError, match=r'metric="loss": expected a loss of each sample, .* whole batch') as e:
            Task(model, data, metric="loss", **options)
        assert "Fix: return one loss per sample instead of their mean" in str(e.value)


def test_a_metric_of_ones_own() -> None:
    model = Encoder()
    batch = {"inputs": X, "labels": Y}
    each = Task(model, batch, metric=lambda out, b: -(out.logits[:, 0] - b["labels"]).abs(), batch_size=25)
    expected = -(model.net(X)[:, 0] - Y).abs().detach().double()
    torch.testing.assert_close(each.score().table[:, 0], expected)
    assert (each.metric.name, each.metric.is_mean, each.metric.ceiling) == ("score", True, None)
    spread = Metric("spread", lambda out, b: out.logits[:, :2], lambda table: float(table.std()))
    scores = Task(model, batch, metric=spread, batch_size=25).score()
    assert scores.value == pytest.approx(float(model.net(X)[:, :2].detach().std()))
    low, high = scores.interval()
    assert low < scores.value < high


@pytest.mark.parametrize(
    ("metric", "found"),
    [
        (lambda out, b: out, r"shape \(8, 3\)"),
        (lambda out, b: float(out.mean()), "one number for the whole batch"),
        (lambda out, b: out[:5, 0], r"shape \(5,\)"),
    ],
)
def test_a_metric_of_the_wrong_shape(metric: Any, found: str) -> None:
    """Known before any long work; a batch's F1 or AUC would be such a number."""
    with pytest.raises(TaskError, match=rf"metric: expected one score per sample, .* found {found}") as e:
        Task(linear(), (X, Y), metric=metric)
    assert 'is a Metric: Metric("name", statistics=' in str(e.value)


def test_without_a_known_loss_the_loss_is_nan() -> None:
    task = Task(Plain(lambda logits: logits[:, 0]), (X, Y), metric=lambda out, b: -(out - b[1]).abs())
    assert not task.can_scale_logits
    assert math.isnan(task.score().loss)
    assert math.isnan(Task(linear(), (X, Y)).score(with_loss=False).loss)


def test_the_metric_needs_logits_but_the_loss_is_the_users() -> None:
    model = linear()
    task = Task(model, (X, Y), loss=lambda m, b: functional.cross_entropy(m(b[0]), b[1]) * 7)
    scores = task.score()
    assert scores.loss == pytest.approx(7 * float(functional.cross_entropy(model(X), Y).detach()))
    assert scores.table[:, 0].equal((model(X).argmax(1) == Y).double())


def test_nan_is_never_right() -> None:
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, math.nan)
    assert Task(model, (X, torch.zeros(60, dtype=torch.long))).score().value == 0


def test_dense_labels_are_scored_by_their_share() -> None:
    model = nn.Conv2d(1, 2, 1)
    nn.init.zeros_(model.weight)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([1.0, 0.0]))  # type: ignore[union-attr]
    labels = torch.tensor([[[0, 0], [0, 1]], [[1, -100], [-100, 0]]])
    assert Task(model, (torch.zeros(2, 1, 2, 2), labels)).score().table.tolist() == [[0.75], [0.5]]


def test_evaluation_follows_the_indices_and_the_data() -> None:
    task = Task(linear(), (X, Y), metric="loss", batch_size=7)
    everything = task.score().table
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(task.score(indices=order).table, everything[order])
    part = task.fit.subset(order[:20])
    torch.testing.assert_close(task.score(part).table, everything[order[:20]])
    torch.testing.assert_close(task.score(part, indices=torch.tensor([3])).table, everything[order[3:4]])


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
    assert seen[-1][0] == float(scores.table.sum())
    assert task.score(stop=lambda total, done: False).complete
    assert task.metric.ceiling == 1.0
    with pytest.raises(TaskError, match="stop: expected a metric that is a mean over samples, found macro_f1"):
        Task(linear(), (X, Y), metric="macro_f1").score(stop=stop)


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
        assert not task.loss((X, Y)).total.requires_grad
    with pytest.raises(KeyError), task.evaluating():
        raise KeyError
    assert model.training


# Logits from elsewhere


def test_the_ensemble_is_absent_where_a_mean_of_outputs_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(task: Task) -> str:
        with pytest.raises(EnsembleError, match="ensemble: expected outputs that can be averaged") as caught:
            task.ensemble_scores(range(1))
        assert caught.value.reason in str(caught.value)
        return caught.value.reason

    own = Task(linear(), (X, Y), metric="loss", loss=lambda m, b: m(b[0]).mean(1))
    assert reason(own) == "a loss of your own as the metric, which calls the model itself"

    def first(outputs: Any, batch: Any) -> Any:  # of the outputs, which a tensor of logits would misread
        return outputs[0][:, 0]

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, :3], x

    task = Task(Pair(), (X, Y), metric=first)
    assert task.score().n == 60
    assert reason(task) == "first, a metric of your own that is given more than a tensor of logits"

    class Classes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(1)

    said = reason(Task(Classes(), (X, Y), metric=lambda out, batch: (out == batch[1]).double()))
    assert said == "outputs of torch.int64, whose mean is no output"
    large = Task(linear(), (X, Y), {"test": (X[:5], Y[:5]), "shifted": (X.repeat(3, 1), Y.repeat(3))})
    large.ensemble_scores(range(1))
    monkeypatch.setattr("stockpot.task.task.MEMORY_LIMIT", 61 * 3 * 8)  # the fitting data alone would fit
    assert reason(large).startswith("outputs of 0.0 GiB for all samples, more than")


def test_measured_values_are_averaged_too() -> None:
    model = nn.Linear(4, 1)
    task = Task(model, (X, X.sum(1)), metric="r2", loss=lambda m, b: (m(b[0])[:, 0] - b[1]).square())
    members = [copy.deepcopy(model.state_dict()), {name: -value for name, value in model.state_dict().items()}]

    def turns() -> Iterator[int]:
        for k, state in enumerate(members):
            model.load_state_dict(state)
            yield k

    predictions = torch.zeros(60)  # the two cancel
    expected = 1 - float(((X.sum(1) - predictions) ** 2).sum() / ((X.sum(1) - X.sum(1).mean()) ** 2).sum())
    assert task.ensemble_scores(turns()).value == pytest.approx(expected, rel=1e-6)


def test_double_precision_is_for_the_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's MPS has no float64. A tensor counts as on the host once `.cpu()` was called on it."""
    host: set[int] = set()
    kept: list[Tensor] = []
    double = Tensor.double

    def cpu(self: Tensor) -> Tensor:
        kept.append(self.clone())
        host.add(id(kept[-1]))
        return kept[-1]

    def checked(self: Tensor) -> Tensor:
        assert id(self) in host, "double precision on the device"
        return double(self)

    seen: list[torch.dtype] = []

    def metric(out: Any, batch: Any) -> Tensor:
        seen.append(out.dtype)
        return torch.eq(out.argmax(1), batch[1]).float()

    task = Task(linear(), (X, Y), metric=metric, batch_size=16)
    monkeypatch.setattr(Tensor, "cpu", cpu)
    monkeypatch.setattr(Tensor, "double", checked)
    assert task.score(stop=lambda total, done: False).value == task.ensemble_scores(range(1)).value
    assert set(seen) == {torch.float32}


def test_a_model_without_logits() -> None:
    task = Task(Plain(lambda logits: None), (X, Y), loss=lambda model, batch: batch[0].mean())
    with pytest.raises(TaskError, match=r"model output for logits: expected a tensor, an object with \.logits"):
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

    torch.testing.assert_close(task.ensemble_scores(members()).table, expected[:, None])
    ten = Data.of((X[:10], Y[:10]))
    torch.testing.assert_close(task.ensemble_scores(members(), ten).table, expected[:10, None])


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
        "check_may_decide", "equal", "fingerprints", "largest", "metrics", "names", "open",
    ]  # fmt: skip
    assert not hasattr(seal, "__dict__")


def test_the_seal_is_broken_for_good() -> None:
    events: list[Event] = []
    task = Task(linear(), (X, Y), report=blobs(30, seed=5))
    task.check_may_decide("anything")
    data = open_report(task, ["a", "b"])["report"]
    assert len(data) == 30
    assert task.score_report(data, listen=events.append).n == 30
    assert events[-1].data["done"] == 30
    assert open_report(task, ["b"])["report"] is data  # what was decided before may be scored again
    task.check_may_decide("a")
    for again in (lambda: task.check_may_decide("c"), lambda: open_report(task, ["a", "c"])):
        with pytest.raises(TaskError, match="a new decision, although it was looked at for 2 earlier ones") as e:
            again()
        assert "Fix: decide everything first: compare(pool, task, [...])" in str(e.value)
    with pytest.raises(TaskError, match="a new decision"):
        copy.deepcopy(task).check_may_decide("c")  # a copy remembers


def test_without_report_data_there_are_no_report_scores() -> None:
    task = Task(linear(), (X, Y))
    assert not task.has_report
    task.check_may_decide("anything")
    with pytest.raises(TaskError, match=r"report scores: expected a task with report data, found none"):
        open_report(task, [])["report"]


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


def test_the_documentation_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {
        "torch": torch, "Task": Task, "model": linear(), "fit": (X, Y), "report": (X, Y), "x": X,
        "labels": (X[:, :3] > 0).float(), "regressor": nn.Linear(4, 1), "y": X[:, 0],
    }  # fmt: skip
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, names)
        for task in (names["task"], names.get("several"), names.get("numbers")):
            if task is not None:
                low, high = task.score().interval()
                assert low <= task.score().value <= high
    assert all(f"`{name}`" in text for name in METRICS)


# Several sets of report data


def test_a_dict_without_tensors_among_its_values_is_several_sets() -> None:
    sets = {"test": blobs(30, seed=5), "shifted": TensorDataset(*blobs(20, seed=6))}
    task = Task(linear(), (X, Y), sets)
    found = report_weights(task)
    assert {name: one.n for name, one in found.items()} == {"test": 30, "shifted": 20}
    assert found["shifted"].value == Task(linear(), sets["shifted"]).score().value
    assert list(task.report_fingerprints()) == ["test", "shifted"]
    columns = Task(Encoder(), {"inputs": X, "labels": Y}, {"inputs": X[:9], "labels": Y[:9]})
    assert {name: one.n for name, one in report_weights(columns).items()} == {"report": 9}
    nested = {"inputs": {"x": X}, "labels": {"y": Y}}  # of the form of the fitting data, so one set
    own = Task(Encoder(), nested, nested, loss=lambda m, b: m(b["inputs"]["x"]).logits.mean(1), metric="loss")
    assert list(own.report_fingerprints()) == ["report"]
    assert own.reports_on_fit == ("report",)


@pytest.mark.parametrize(
    ("report", "groups", "text"),
    [
        ({"fit": (X, Y)}, None, "name of a set of report data: expected up to 40 letters, .* found 'fit'"),
        ({"a/b": (X, Y)}, None, "none of fit, held_out, found 'a/b'"),
        ({3: (X, Y)}, None, "found 3"),
        ({"test": (X, Y)}, [0] * 60, "report_groups: expected a dict, as report is one, found list"),
        ({"test": (X, Y)}, {"tset": [0] * 60}, "report_groups: expected groups of sets that are there, found 'tset'"),
        ({"test": (X, Y), "shifted": (X, Y[:5])}, None, "report data 'shifted': expected the same number of rows"),
    ],
)
def test_sets_that_cannot_be_meant_are_refused(report: Any, groups: Any, text: str) -> None:
    with pytest.raises(TaskError, match=text):
        Task(linear(), (X, Y), report, report_groups=groups)


def test_each_set_has_its_own_groups() -> None:
    task = Task(linear(), (X, Y), {"test": (X, Y), "more": (X, Y)}, report_groups={"more": [k // 6 for k in range(60)]})
    assert {name: one.independent for name, one in report_weights(task).items()} == {"test": 60, "more": 10}
