"""Running statistics: untouched while learning, estimated again afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stockpot.errors import TaskError
from stockpot.events import Event
from stockpot.task import Task

from .models import blobs, linear, normalised

X, Y = blobs()


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def instance() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(4, 3)
    )


def test_names() -> None:
    task = Task(normalised(), (X, Y))
    assert task.has_statistics
    assert task.statistic_names == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    plain = Task(linear(), (X, Y))
    assert not plain.has_statistics
    assert plain.statistic_names == ()
    assert plain.recalibrate() == {}
    untracked = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    assert not Task(untracked, (X, Y)).has_statistics


def test_a_layer_in_two_places_has_both_names() -> None:
    norm = nn.BatchNorm1d(4)
    task = Task(nn.Sequential(norm, norm, nn.Linear(4, 3)), (X, Y))
    assert [name for name in task.statistic_names if name.endswith("mean")] == ["0.running_mean", "1.running_mean"]


def test_learning_uses_batch_statistics_without_dropout() -> None:
    model = normalised()
    task = Task(model, (X, Y))
    with task.learning():
        loss = task.loss((X[:20], Y[:20])).mean
    hidden = model[0](X[:20])  # type: ignore[index]
    centred = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
    expected = nn.functional.cross_entropy(model[4](centred.relu()), Y[:20])  # type: ignore[index]
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("make", [normalised, instance])
def test_learning_touches_no_buffer_and_restores_every_flag(make: type[nn.Module]) -> None:
    model = make()
    model.train()
    list(model.children())[-1].eval()
    task = Task(model, (X, Y))
    flags = [(m.training, getattr(m, "track_running_stats", None)) for m in model.modules()]
    before = buffers(model)
    kept = {name: id(value) for name, value in model.named_buffers()}

    def learn_and_fail() -> None:
        with task.learning():
            for _ in range(3):
                task.loss((X + 3, Y))
            raise KeyError

    with pytest.raises(KeyError):
        learn_and_fail()
    assert [(m.training, getattr(m, "track_running_stats", None)) for m in model.modules()] == flags
    assert {name: id(value) for name, value in model.named_buffers()} == kept
    assert all(value.equal(before[name]) for name, value in buffers(model).items())


def test_learning_with_instance_statistics_normalises_each_sample() -> None:
    model = instance()
    task = Task(model, (X, Y))
    with task.learning():
        first = task.logits((X[:1], Y[:1]))
        together = task.logits((X, Y))
    torch.testing.assert_close(first[0], together[0])
    assert not torch.allclose(first[0], task.logits((X * 3 + 1, Y))[0])


def test_recalibration_in_one_batch_is_the_mean_and_variance_of_the_data() -> None:
    model = normalised()
    model.train()
    task = Task(model, (X, Y), batch_size=60)
    found = task.recalibrate()
    hidden = model[0](X).detach()  # type: ignore[index]
    torch.testing.assert_close(found["1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(found["1.running_var"], hidden.var(0))
    assert model.state_dict()["1.running_mean"].equal(found["1.running_mean"])  # and it stays there
    assert model.training
    assert model[1].momentum == 0.1  # type: ignore[index]


def test_recalibration_averages_all_batches_by_their_size() -> None:
    model = normalised()
    task = Task(model, (X, Y), batch_size=25)  # pieces of 20
    model[1].running_mean.fill_(1e6)  # type: ignore[index]
    found = task.recalibrate()
    hidden = model[0](X).detach()[task.fit.order(0, 0, 60)]  # type: ignore[index]
    torch.testing.assert_close(found["1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(found["1.running_var"], hidden.reshape(3, 20, 8).var(1).mean(0))
    assert int(found["1.num_batches_tracked"]) == 3
    again = task.recalibrate()
    assert all(again[name].equal(value) for name, value in found.items())


def test_recalibration_weighs_pieces_of_uneven_size_and_never_leaves_one_sample_alone() -> None:
    model = normalised()
    task = Task(model, (X[:5], Y[:5]), batch_size=4)  # 3 + 2, not 4 + 1
    found = task.recalibrate()
    hidden = model[0](X[:5]).detach()  # type: ignore[index]
    torch.testing.assert_close(found["1.running_mean"], hidden.mean(0))


def test_recalibration_of_a_layer_used_twice_averages_both_uses() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.norm(x) + self.norm(x + 10))
            return out

    found = Task(Twice(), (X, Y)).recalibrate()
    torch.testing.assert_close(found["norm.running_mean"], X.mean(0) + 5)


def test_recalibration_leaves_unused_layers_and_failed_runs_as_they_were() -> None:
    model = normalised()
    model.add_module("unused", nn.BatchNorm1d(2))
    unused = model.get_submodule("unused")
    unused.running_mean.fill_(7.0)  # type: ignore[operator]
    calls = 0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:  # after a trial and a first recalibration of two batches
            raise KeyError
        x = batch[0]
        for layer in list(model.children())[:-1]:
            x = layer(x)
        return nn.functional.cross_entropy(x, batch[1], reduction="none")

    task = Task(model, (X, Y), loss=loss, metric="loss", batch_size=30)
    found = task.recalibrate()
    assert found["unused.running_mean"].tolist() == [7.0, 7.0]
    assert not found["1.running_mean"].equal(torch.zeros(8))
    before = buffers(model)
    with pytest.raises(TaskError, match=r"loss, which is your own code: .* KeyError"):
        task.recalibrate()
    assert all(value.equal(before[name]) for name, value in buffers(model).items())


def test_recalibration_can_be_limited_and_reports_progress() -> None:
    task = Task(normalised(), (X, Y), batch_size=10)
    events: list[Event] = []
    found = task.recalibrate(events.append, limit=20)
    assert [event.data["done"] for event in events] == [10, 20]
    assert int(found["1.num_batches_tracked"]) == 2
