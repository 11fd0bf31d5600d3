"""Bad input is found before any long work, and said in words."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stockpot.errors import DataError, TaskError
from stockpot.names import placed, suggest_rename
from stockpot.task import Task

from .models import Encoder, Plain, blobs, linear, normalised

X, Y = blobs()


# Labels


def bad(value: int, at: int = 41) -> Tensor:
    labels = Y.clone()
    labels[at] = value
    return labels


@pytest.mark.parametrize("value", [3, -1, 255])
def test_labels_out_of_range_are_named(value: int) -> None:
    with pytest.raises(DataError) as caught:
        Task(linear(), (X, bad(value)))
    assert str(caught.value) == (
        "labels of fit data: expected 0 to 2 (the model has 3 classes), "
        f"found {value} at index 41 (1 of 60 are out of range).\n"
        "  Fix: number the classes from 0, or build the model with the right number of classes."
    )


def test_labels_out_of_range_never_reach_the_model() -> None:
    with pytest.raises(DataError, match=r"found 9 at index 2"):
        Task(Encoder(), {"inputs": X, "labels": bad(9, at=2)})  # in the trial batch; its own loss would raise


def test_labels_of_the_report_data_are_checked_too() -> None:
    with pytest.raises(DataError, match=r"labels of report data: .* found 7 at index 5"):
        Task(linear(), (X, Y), (X, bad(7, at=5)))


def test_labels_counted_from_one() -> None:
    with pytest.raises(DataError, match=r"found 3 at index 2 .*\n  Fix: these labels count from 1; subtract 1"):
        Task(linear(), (X, Y + 1))


def test_a_sample_without_a_label_has_no_score_and_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"found -100 at index 41 .*\n  Fix: leave samples without a label \(-100\) out"
    ):
        Task(linear(), (X, bad(-100)))


class OneOutput(nn.Module):
    """A regression as transformers has it: whole numbers will do, and the loss is the squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.net(x)
        return SimpleNamespace(logits=logits, loss=(logits.squeeze(1) - labels).square().mean())


def test_classes_need_an_output_each() -> None:
    data = {"x": X, "labels": Y}
    with pytest.raises(
        DataError, match=r"expected 0 \(the model has one output\), found (?s:.*)data.target: number or multi"
    ):
        Task(OneOutput(), data)
    task = Task(OneOutput(), data, metric="loss")  # of whole numbers that are measured
    with torch.no_grad():
        assert -task.score().value == pytest.approx(float(task.model(**task.fit.batch(torch.arange(len(X)))).loss))


def test_labels_are_not_judged_where_they_cannot_be() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0], 1).mean(1)  # type: ignore[no-any-return]

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = linear()

        def forward(self, x: Tensor, power: int) -> Tensor:
            out: Tensor = self.net(x) ** power
            return out

    Task(Odd(), (X, bad(99)), loss=loss, metric="loss")  # only the loss can call this model
    with pytest.raises(TaskError, match=r"model Odd: expected outputs for a batch, found TypeError: .* 'power'") as e:
        Task(Odd(), (X, bad(99)), loss=loss)  # and accuracy needs its outputs
    assert 'with one loss per sample and metric="loss"' in str(e.value)
    Task(linear(), (X, bad(99)), loss=lambda m, b: m(b[0]).mean(1), metric="loss")
    Task(linear(), (X, X, bad(99)), loss=lambda m, b: m(b[0]).mean(1), metric="loss")


# The model against the data


def test_a_model_that_cannot_take_the_data() -> None:
    with pytest.raises(TaskError, match=r"model Linear: expected outputs for a batch, found RuntimeError: mat1"):
        Task(nn.Linear(5, 3), (X, Y))


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ((X, X, Y), linear(), r"batch: expected \(inputs, labels\) or a dict .*found a tuple of 3"),
        (X, linear(), r"expected \(inputs, labels\), or a dict with one of the keys .* found no labels"),
        ((X, Y.float()), linear(), r"found logits \(8, 3\) with labels \(8,\) float32"),
        (
            {"inputs": X, "labels": Y.unsqueeze(1).repeat(1, 4)},
            Plain(lambda logits: logits.unsqueeze(1).repeat(1, 4, 1)),
            r'for metric="accuracy": expected logits \(n, classes\) .* found logits \(8, 4, 3\)',
        ),
        ((X, Y), Plain(lambda logits: None), r"model output for metric=\"accuracy\": .* found NoneType"),
    ],
)
def test_data_that_the_defaults_cannot_judge(data: Any, model: nn.Module, message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        Task(model, data)
    assert "Fix: " in str(caught.value)


def test_token_losses_come_from_the_model() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 5)

        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            logits = self.embed(ids)  # (n, T, 5)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return SimpleNamespace(logits=logits, loss=loss)

    ids = torch.arange(40).reshape(8, 5) % 5
    task = Task(Language(), {"ids": ids, "labels": ids}, metric="loss")
    batch = task.fit.batch(torch.arange(8))
    assert float(task.loss(batch).mean.detach()) == pytest.approx(-task.score().value)
    logits = task.model(**batch).logits
    smoothed = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(task.loss(batch, label_smoothing=0.1).mean, smoothed)


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "f1"}, r"metric: expected 'accuracy', 'loss', .* a Metric, or a function .*, found 'f1'"),
        ({"loss": "mse"}, r"loss: expected a function loss\(model, batch\), found 'mse'"),
        ({"autocast": torch.int8}, r"autocast: expected torch.bfloat16, torch.float16 or None, found torch.int8"),
        ({"batch_size": 0}, r"batch_size: expected a whole number of at least 1, found 0"),
        ({"statistics": "keep"}, r"statistics: expected 'recalibrate', 'average' or 'copy', found 'keep'"),
        ({"device": "warp"}, r"device: expected a device of this machine .*, found warp \("),
        ({"model": nn.Linear}, r"model: expected a torch.nn.Module, found type"),
    ],
)
def test_impossible_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        Task(**{"model": linear(), "fit": (X, Y), **options})
    assert "Fix: " in str(caught.value)


# The loss at the start


def test_a_good_loss_passes_and_nothing_changes() -> None:
    model = normalised()
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Task(model, (X, Y)).check_loss()
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == [False] * 2 + [True] * 4
    assert model.training


def test_a_frozen_model_still_has_a_gradient() -> None:
    Task(linear().requires_grad_(False), (X, Y)).check_loss()


def test_a_loss_flat_on_a_few_samples_passes() -> None:
    def hinge(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]).sum(1) * (batch[0][:, 0] == X[30, 0])).mean()  # type: ignore[no-any-return]

    Task(linear(), (X, Y), loss=hinge).check_loss()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: m(b[0]), r"loss: expected a scalar tensor, .* found a tensor of shape \(8, 3\)"),
        (lambda m, b: 1.5, r"loss: expected a scalar tensor, the mean over the batch, or .*, found float"),
        (lambda m, b: m(b[0]).mean() * math.inf, r"loss at the start: expected a finite number, found -?inf"),
        (lambda m, b: m(b[0]).mean() * math.nan, r"loss at the start: expected a finite number, found nan"),
        (lambda m, b: b[0].mean(), r"depends on the model's parameters, found the loss has no gradient function"),
        (lambda m, b: m(b[0]).detach().mean(), r"found the loss has no gradient function"),
        (lambda m, b: m(b[0]).mean() * 0, r"found every parameter's gradient is None or exactly zero"),
        (
            lambda m, b: torch.ones((), requires_grad=True) * b[0].mean(),
            r"found every parameter's gradient is None or exactly zero",
        ),
    ],
)
def test_losses_that_cannot_be_learned_from(loss: Any, message: str) -> None:
    model = linear()
    task = Task(model, (X, Y), loss=loss)
    with pytest.raises(TaskError, match=message) as caught:
        task.check_loss()
    assert "Fix: " in str(caught.value)
    assert all(parameter.grad is None for parameter in model.parameters())


# The model against the pool


def specs(model: nn.Module) -> dict[str, Any]:
    return {name: SimpleNamespace(shape=tuple(value.shape)) for name, value in model.state_dict().items()}


def test_a_model_that_fits_the_pool() -> None:
    model = normalised()
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    task = Task(model, (X, Y))
    task.check_names(specs(model))
    task.check_names({name: spec for name, spec in specs(model).items() if "num_batches" not in name})


def test_everything_that_differs_is_listed() -> None:
    task = Task(linear(), (X, Y))
    pool = specs(linear(classes=5)) | {"other.weight": SimpleNamespace(shape=(2,))}
    del pool["0.bias"]
    with pytest.raises(TaskError) as caught:
        task.check_names(pool)
    assert str(caught.value) == (
        "model Sequential: expected the pool's 4 tensors, found the model lacks 1: other.weight;\n"
        "  the model has 1 more: 0.bias;\n"
        "  2 with other shapes: 2.weight: model (3, 8), pool (5, 8); 2.bias: model (3,), pool (5,).\n"
        "  Fix: build the model exactly as it was fine-tuned, or open the pool with rename= or key=."
    )


def test_a_head_of_another_size() -> None:
    task = Task(linear(), (X, Y))
    with pytest.raises(TaskError, match=r"Fix: build the model with the sizes it was fine-tuned with"):
        task.check_names(specs(linear(classes=5)))


def test_prefixes_are_recognised() -> None:
    model = linear()
    task = Task(model, (X, Y))
    with pytest.raises(TaskError) as caught:
        task.check_names({f"module.net.{name}": spec for name, spec in specs(model).items()})
    expected = "rename={'module.net.': ''} (in a recipe, pool.rename: {'module.net.': ''})."
    assert str(caught.value).endswith(f"Fix: open the pool with {expected}")
    task = Task(Encoder(), {"inputs": X, "labels": Y})
    with pytest.raises(TaskError) as caught:
        task.check_names(specs(model))
    assert "pool.rename: {'': 'net.'})" in str(caught.value)


@pytest.mark.parametrize(
    ("pool", "model", "expected"),
    [
        (["model.a.w", "model.b.w"], ["a.w", "b.w"], {"model.": ""}),
        (["a.w", "b.w"], ["model.a.w", "model.b.w"], {"": "model."}),
        (["old.a.w", "old.b.w"], ["new.a.w", "new.b.w"], {"old.": "new."}),
        (["body.w", "fc.w"], ["body.w", "head.w"], {"fc.": "head."}),
        # A prefix for everything would take the place of the head away.
        (["a.w", "b.w", "head.w"], ["model.a.w", "model.b.w", "head.w"], {"a.": "model.a.", "b.": "model.b."}),
        (["a.w"], ["b.v"], None),
        (["a.w"], ["a.w"], None),
    ],
)
def test_the_renaming_that_helps_most(pool: list[str], model: list[str], expected: dict[str, str] | None) -> None:
    shapes = {name: (k + 2,) for k, name in enumerate(dict.fromkeys(n.split(".")[-2] for n in pool + model))}
    shapes |= {"fc": (9,), "head": (9,)}
    found = suggest_rename(
        {name: shapes[name.split(".")[-2]] for name in pool}, {name: shapes[name.split(".")[-2]] for name in model}
    )
    assert found == expected
    if expected is not None:
        renamed = {next((n + p[len(o) :] for o, n in expected.items() if p.startswith(o)), p) for p in pool}
        assert renamed == set(model)


def test_a_name_with_another_shape_is_no_hint() -> None:
    assert suggest_rename({"a.w": (2,)}, {"m.a.w": (3,)}) is None
    places: dict[str, tuple[int, ...]] = {"b.x": (2,), "b.y": (4,), "c.x": (2,), "c.y": (3,)}
    pool: dict[str, tuple[int, ...]] = {"a.x": (2,), "a.y": (3,)}
    assert suggest_rename(pool, places) == {"a.": "c."}
    assert placed(pool, places, {"a.": "b."}) == 1  # a name is not enough to fit


def test_names_that_no_model_has_keep_nobody_waiting() -> None:
    """A stranger's file can have any number of names, and any length of them."""
    deep = "a." * 250 + "w"
    assert suggest_rename({deep: (2,)}, {f"b.{deep}": (2,)}) is None
    many: dict[str, tuple[int, ...]] = {f"a{n}.w": (2,) for n in range(5_000)}
    begun = time.process_time()
    assert suggest_rename(many, {f"b.{name}": shape for name, shape in many.items()}) == {"": "b."}
    assert time.process_time() - begun < 4


def test_many_names_are_cut_short() -> None:
    task = Task(linear(), (X, Y))
    with pytest.raises(TaskError, match=r"the model lacks 20: a0, a1, .*, a7, and 12 more"):
        task.check_names(specs(linear()) | {f"a{i}": SimpleNamespace(shape=()) for i in range(20)})


def test_one_name_of_a_tied_pair_is_enough() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x))
            return out

    task = Task(Tied(), (X, Y))
    task.check_names({"first.weight": SimpleNamespace(shape=(4, 4))})
    task.model.second.weight = nn.Parameter(torch.zeros(4, 4))  # type: ignore[union-attr]
    with pytest.raises(TaskError, match=r"the model has 1 more: second.weight"):
        task.check_names({"first.weight": SimpleNamespace(shape=(4, 4))})


def test_columns_that_only_the_users_functions_read_are_not_passed_to_the_model() -> None:
    data = {"input": X, "weight": torch.ones(len(X)), "y": Y}

    def loss(model: nn.Module, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch["input"]), batch["y"], reduction="none") * batch["weight"]

    def right(outputs: Tensor, batch: Any) -> Any:
        return (outputs.argmax(1) == batch["y"]) * batch["weight"]

    for given in ({"loss": loss}, {"metric": right}, {"loss": loss, "metric": right}):
        task = Task(linear(), data, **given)
        assert 0 <= task.score().value <= 1
    with pytest.raises(TaskError, match="found weight, which nothing reads"):  # a slip
        Task(linear(), data)
