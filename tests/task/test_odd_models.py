"""Models, losses and metrics that do what one does not expect: each gives the right result or a text."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from stockpot import cook
from stockpot.errors import TaskError
from stockpot.task import METRICS, Metric, Task, judge
from stockpot.task.batches import users_code
from zoo import zoo

from .models import Plain, blobs, linear, normalised

X, Y = blobs()


# Errors in the user's functions


def broken_metric(outputs: Any, batch: Any) -> Tensor:
    return batch["no such key"]  # type: ignore[no-any-return]


def broken_late(outputs: Any, batch: Any) -> Tensor:
    return outputs.new_zeros(60)[[len(batch[1]) + 50]].expand(len(outputs))  # type: ignore[no-any-return]


def broken_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1].float())


def broken_reduction(table: Tensor) -> float:
    return float(table[:, 7].sum())


def line_of(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if text in line)
    return f"{__file__}, line {number}: {lines[number - 1].strip()}"


def test_an_error_in_the_users_metric_is_the_users() -> None:
    with pytest.raises(
        TaskError, match=r"^metric broken_metric, which is your own code: expected a value, found TypeError"
    ) as e:
        Task(linear(), (X, Y), metric=broken_metric)
    assert line_of('batch["no such') in str(e.value)
    assert isinstance(e.value.__cause__, TypeError)
    task = Task(linear(), (X, Y), metric=broken_late, batch_size=30)
    with pytest.raises(TaskError, match="your own code: expected a value, found IndexError") as e:
        task.score()
    assert line_of("new_zeros(60)[[") in str(e.value)
    assert task.model.training  # as it was


def test_an_error_in_the_users_reduction_is_the_users() -> None:
    metric = Metric("odd", lambda outputs, batch: outputs[:, :2], broken_reduction)
    scores = Task(linear(), (X, Y), metric=metric).score()
    with pytest.raises(TaskError, match=r"reduction of metric odd, which is your own code: .*IndexError") as e:
        _ = scores.value
    assert line_of("table[:, 7]") in str(e.value)


def test_an_error_in_the_users_loss_is_the_users_although_torch_raises_it() -> None:
    task = Task(linear(), (X, Y), loss=broken_loss)
    with pytest.raises(TaskError, match="loss, which is your own code: expected a value, found RuntimeError") as e:
        task.check_loss()
    assert line_of("batch[1].float())") in str(e.value)


def test_memory_that_runs_out_in_a_users_function_is_not_its_fault() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: 9 GiB")):
        with pytest.raises(type(error), match="memory"), users_code("loss", broken_loss):
            raise error


def test_our_own_mistakes_stay_ours() -> None:
    with pytest.raises(KeyError), users_code("metric accuracy", METRICS["accuracy"].statistics):
        raise KeyError


# Models that draw numbers in evaluation mode


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(functional.dropout(x, 0.5, training=True))  # type: ignore[no-any-return]


def test_a_model_that_draws_numbers_scores_the_same_again() -> None:
    task = Task(Noisy(), (X, Y), metric="loss", batch_size=16)
    before = torch.get_rng_state()
    first = task.score()
    assert torch.get_rng_state().equal(before)  # the caller's own numbers are left alone
    torch.rand(100)
    assert task.score().table.equal(first.table)
    assert task.score(indices=torch.arange(16, 60)).table.equal(first.table[16:])  # whatever ran before
    assert task.ensemble_scores(range(2)).table.equal(task.ensemble_scores(range(2)).table)
    assert not first.table[:16].equal(task.score(indices=torch.arange(1, 17)).table)


def test_and_its_statistics_are_the_same_again() -> None:
    task = Task(nn.Sequential(Noisy(), nn.BatchNorm1d(3)), (X, Y), batch_size=16)
    first = task.recalibrate()
    torch.rand(100)
    assert all(value.equal(first[name]) for name, value in task.recalibrate().items())


# Buffers that the model never saves


class Masked(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.net = linear()
        self.mask: Tensor
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.mask)  # type: ignore[no-any-return]


def test_a_checkpoints_buffer_that_the_model_calls_non_persistent_is_used() -> None:
    """As cooking uses it; evaluating with torch's own loader left it out, and gave another score."""
    saved = Masked(torch.tensor([1.0, 0.0, 2.0, 0.5]))
    checkpoint = {**saved.state_dict(), "mask": saved.mask}
    task = Task(Masked(torch.ones(4)), (X, Y), metric="loss")
    task.check_names(checkpoint)
    task.load(checkpoint)
    assert task.score().table.equal(Task(saved, (X, Y), metric="loss").score().table)
    with pytest.raises(TaskError, match=r"the model lacks 1: other"):
        task.load({**checkpoint, "other": X})


def test_loading_takes_tied_names_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))  # type: ignore[no-any-return]

    state = {name: value + 1 for name, value in Tied().state_dict().items() if name != "b.weight"}
    task = Task(Tied(), (X, Y))
    task.load(state)
    assert task.model.state_dict()["b.weight"].equal(state["a.weight"])


# Batch normalisation


def test_a_batch_of_one_with_batch_normalisation() -> None:
    task = Task(normalised(), (X[:1], Y[:1]))
    with pytest.raises(TaskError, match=r"a batch of one sample: expected two or more: .* got input size") as e:
        task.check_loss()
    assert "Fix: raise batch_size, or cut batches into fewer pieces (accumulate)" in str(e.value)
    own = Task(normalised(), (X, Y), loss=lambda m, b: functional.cross_entropy(m(b[0]), b[1]))
    with own.learning(), pytest.raises(TaskError, match=r"^a batch of one sample"):
        own.loss((X[:1], Y[:1]))


# Losses of whole batches


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    found = functional.normalize(model(batch[0]), dim=1)
    return functional.cross_entropy(found @ found.T * 5, torch.arange(len(found)))


def of_tokens(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["input"]).flatten(0, 1), batch["labels"].flatten())


def token_data() -> dict[str, Tensor]:
    labels = torch.randint(5, (12, 6), generator=torch.Generator().manual_seed(0))
    for row in range(12):
        labels[row, 1 + row % 6 :] = -100
    return {"input": torch.randint(5, (12, 6)), "labels": labels}


def noisy_loss(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0] + torch.randn_like(batch[0])
    return (model(x) - 1).square().mean()  # type: ignore[no-any-return]


def test_losses_of_whole_batches_are_told_from_sums() -> None:
    """They belong to one batch size: folds must be judged, and gradients taken, at that size."""
    assert not Task(linear(), (X, Y), loss=contrastive).loss_adds_up
    mean = Task(linear(), (X, Y), loss=lambda m, b: functional.cross_entropy(m(b[0]), b[1]))
    assert mean.loss_adds_up
    assert Task(linear(), (X, Y)).loss_adds_up
    assert Task(normalised(), (X, Y)).loss_adds_up
    model = nn.Embedding(5, 5)
    assert not Task(model, token_data(), loss=of_tokens, metric=lambda out, b: out[:, 0, 0]).loss_adds_up
    assert Task(linear(), (X, Y), loss=noisy_loss).loss_adds_up  # cannot be seen
    assert Task(linear(), (X[:1], Y[:1])).loss_adds_up


# Devices without double precision


class NoDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails wherever a tensor in double precision is made, as on Apple's MPS."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        assert torch.float64 not in made, f"{func} makes double precision on the device"
        return out


class Own(nn.Module):
    """Brings its own loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear()

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = self.net(inputs)
        return SimpleNamespace(logits=logits, loss=functional.cross_entropy(logits, labels))


MPS = torch.device("mps")
NUMBERS = ("r2", "negative_mse", "negative_mae", "pearson", "spearman")


OF_TOKENS = ("bits_per_byte", "exact_match")  # and those that say so
PLAIN = [n for n, m in METRICS.items() if not (m.tokens or m.calls_model or n in OF_TOKENS)]


@pytest.mark.parametrize("name", [*PLAIN, "own"])
def test_nothing_on_the_device_is_in_double_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a task computes on the device: loss, logits and statistics. The rest is moved to the host first."""
    if name == "own":
        task = Task(Own(), {"inputs": X, "labels": Y}, metric="loss", batch_size=16)
    elif name in NUMBERS:
        model = Plain(lambda logits: logits[:, 0])
        task = Task(model, (X, X[:, 0]), loss=lambda m, b: (m(b[0]) - b[1]).square(), metric=name, batch_size=16)
    else:
        task = Task(linear(2), (X, Y % 2), metric=name, batch_size=16)
    for method in ("loss", "logits", "statistics", "statistics_of_logits", "call"):
        original = getattr(judge.Judge, method)

        def guarded(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            with NoDouble():  # type: ignore[no-untyped-call]
                return original(*args, **kwargs)

        monkeypatch.setattr(judge.Judge, method, guarded)
    scores = task.score()
    assert scores.table.dtype == torch.float64
    with task.learning():
        task.loss(task.fit.batch(torch.arange(8)))
    assert task.ensemble_scores(range(2)).n == 60


def test_doubles_in_the_data_become_singles_where_there_are_none() -> None:
    task = Task(linear(), (X, Y))
    task.device = torch.device("mps")
    seen: list[torch.dtype] = []

    class Leaf(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Tensor:
            seen.append(self.dtype)
            return self

    for data in (X.double(), X, Y):
        task.to_device((data.as_subclass(Leaf),))
    assert seen == [torch.float32, torch.float32, torch.int64]


class SingleOnly(TorchFunctionMode):
    """Takes Apple's device for the host, and fails where something asks for double precision there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        args, kwargs = tree_map(lambda leaf: torch.device("cpu") if leaf == MPS else leaf, given)
        out = func(*args, **kwargs)
        if MPS in tree_leaves(given):
            self.asked = True
            assert not (isinstance(out, Tensor) and out.dtype == torch.float64), f"{func} in double precision"
        return out


@pytest.mark.parametrize("method", ["crossfit", "mehl+", "learned+", "greedy", "ensemble"])
def test_no_method_asks_for_double_precision_on_the_device(tmp_path: Path, method: str) -> None:
    pool, task = zoo(tmp_path, 3)
    vars(task)["device"] = task.evaluator.device = MPS
    steps: dict[str, Any] = {} if method in ("greedy", "ensemble") else {"steps": 5}
    with SingleOnly() as mode:
        cook(pool, task, method, **steps)
    assert mode.asked


def test_a_copy_of_a_task_is_a_task() -> None:
    task = Task(linear(), (X, Y), metric="macro_f1")
    assert copy.deepcopy(task).score().value == task.score().value
