"""Losses as a sum and a weight: what pieces of a batch add up to, and which labels are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stockpot.errors import DataError, TaskError
from stockpot.task import METRICS, Loss, Task

from .models import Plain, blobs, linear

X, Y = blobs()
VOCABULARY = 7


class Tagger(nn.Module):
    """Token logits with the mean over labelled tokens as its own loss, as Hugging Face models compute it."""

    shift = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.embed(ids)  # (n, T, C)
        if labels is None:
            return SimpleNamespace(logits=logits)
        used, target = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        return SimpleNamespace(logits=logits, loss=functional.cross_entropy(used.flatten(0, 1), target.flatten()))


class TinyForCausalLM(Tagger):
    shift = True


def sequences(n: int = 12, length: int = 9) -> dict[str, Tensor]:
    """Of very unequal numbers of labelled tokens; the last one has none."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (n, length), generator=generator)
    labels = torch.randint(VOCABULARY, (n, length), generator=generator)
    for row in range(n):
        labels[row, min(length, 2 + row) :] = -100
    labels[-1] = -100
    return {"ids": ids, "labels": labels}


def mean_squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - 1).square().mean()  # type: ignore[no-any-return]


def each_square(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - 1).square().mean(1)  # type: ignore[no-any-return]


def weighted_squares(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    weights = batch[1].to(torch.float64) + 0.5
    return (model(batch[0]) - 1).square().mean(1) * weights, weights


def summed_squares(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    totals, weights = weighted_squares(model, batch)
    return totals.sum(), float(weights.sum())


def image_task(metric: str = "accuracy") -> Task:
    labels = torch.randint(2, (12, 3, 3), generator=torch.Generator().manual_seed(0))
    labels[:5, 0] = -100
    images = torch.randn(12, 1, 3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return Task(nn.Conv2d(1, 2, 1).double(), (images, labels), metric=metric)


POINTS = (X.double(), Y)
PROBABILITIES = functional.softmax(X[:, :3].double(), dim=1)
TASKS: dict[str, Callable[[], Task]] = {
    "classes": lambda: Task(linear().double(), POINTS),
    "probabilities": lambda: Task(linear().double(), (X.double(), PROBABILITIES)),
    "pixels": image_task,
    "tokens": lambda: Task(Tagger().double(), sequences(), metric="loss"),
    "next tokens": lambda: Task(TinyForCausalLM().double(), sequences(), metric="loss"),
    "a mean": lambda: Task(linear().double(), POINTS, loss=mean_squares),
    "each sample": lambda: Task(linear().double(), POINTS, loss=each_square),
    "sums and weights": lambda: Task(linear().double(), POINTS, loss=weighted_squares),
    "a sum and a weight": lambda: Task(linear().double(), POINTS, loss=summed_squares),
}


@pytest.mark.parametrize("kind", TASKS)
def test_a_batch_in_any_number_of_pieces_has_the_same_loss_and_gradient(kind: str) -> None:
    task = TASKS[kind]()
    parameters = list(task.model.parameters())

    def whole(pieces: int) -> list[Tensor]:
        rows = torch.arange(12).tensor_split(pieces)
        parts = [task.loss(task.fit.batch(piece)) for piece in rows]
        mean = Loss(sum(p.total for p in parts), sum(p.weight for p in parts)).mean  # type: ignore[arg-type]
        return [mean, *torch.autograd.grad(mean, parameters)]

    for pieces in (2, 5, 12):
        torch.testing.assert_close(whole(pieces), whole(1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("model", [Tagger, TinyForCausalLM])
def test_tokens_are_counted_as_the_model_counts_them(model: type[Tagger]) -> None:
    data = sequences()
    task = Task(model(), data, metric="loss")
    loss = task.loss(data)
    labelled = (data["labels"][:, 1:] if model.shift else data["labels"]) != -100
    assert float(loss.weight) == float(labelled.sum())
    torch.testing.assert_close(loss.mean, task.model(**data).loss)
    assert task.can_scale_logits
    torch.testing.assert_close(task.loss(data, beta=torch.tensor(1.0)).mean, loss.mean)


def test_loss_and_perplexity_of_tokens_do_not_depend_on_the_batch_size() -> None:
    data = sequences()
    model = TinyForCausalLM()
    mean = float(model(**data).loss.detach())
    for size in (1, 5, 12):
        task = Task(model, data, metric="loss", batch_size=size)
        scores = task.score()
        assert not task.metric.is_mean
        assert task.metric.name == "loss"
        assert scores.value == pytest.approx(-mean)
        assert scores.loss == pytest.approx(mean)
        low, high = scores.interval()
        assert low < scores.value < high
        perplexity = Task(model, data, metric="perplexity", batch_size=size).score()
        assert perplexity.value == pytest.approx(-float(torch.tensor(mean).exp()))
        assert perplexity.table[:, 1].tolist() == (data["labels"][:, 1:] != -100).sum(1).tolist()


@pytest.mark.parametrize("shift", [False, True])
def test_which_tokens_an_untrained_model_predicts_is_seen_in_its_loss_not_in_its_name(shift: bool) -> None:
    """Near zero weights both losses are the logarithm of the vocabulary, within a part in a thousand."""

    class Decoder(Tagger):
        pass

    Decoder.shift = shift
    model = Decoder()
    with torch.no_grad():
        model.embed.weight *= 1e-3
    data = sequences()
    score = Task(model, data, metric="loss").score()
    assert score.value == pytest.approx(-float(model(**data).loss.detach()), abs=1e-6)


def test_the_score_of_pixels_is_their_loss_however_many_have_a_label() -> None:
    task = image_task(metric="loss")
    with torch.no_grad():
        expected = float(task.loss(task.fit.batch(torch.arange(12))).mean)
    scores = task.score()
    assert (-scores.value, scores.loss) == pytest.approx((expected, expected))
    assert task.metric.name == "loss"


def test_a_real_causal_language_model() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    data = sequences()
    batch = {"input_ids": data["ids"], "labels": data["labels"]}
    task = Task(model, batch, metric="perplexity", batch_size=5)
    expected = float(model(**batch).loss.detach())
    assert float(task.loss(batch).mean.detach()) == pytest.approx(expected, rel=1e-6)
    assert task.score().value == pytest.approx(-torch.tensor(expected).exp().item(), rel=1e-5)


def test_losses_that_models_bring_are_known_per_sample() -> None:
    class Own(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.net, self.function = linear(), function

        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            logits = self.net(inputs)
            return SimpleNamespace(logits=logits, loss=self.function(logits, labels))

    several = (X[:, :3] > 0).float()
    for function in (functional.binary_cross_entropy_with_logits, functional.mse_loss):
        model = Own(function)
        task = Task(model, {"inputs": X, "labels": several}, metric="loss", batch_size=7)
        assert task.score().value == pytest.approx(-float(function(model.net(X), several).detach()))
        assert not task.can_scale_logits


# Targets are not guessed


@pytest.mark.parametrize(
    ("labels", "metric", "found"),
    [
        ((X[:, :3] > 0).float(), "accuracy", r"rows of 0 and 1 with none or several ones \(multi-hot\)"),
        (X[:, :3], "loss", "rows of numbers that do not sum to 1"),
        ((X[:, :3] > 0).long(), "accuracy", r"logits \(8, 3\) with labels \(8, 3\) int64"),
        (X[:, 0], "loss", r"logits \(8, 3\) with labels \(8,\) float32"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels: Tensor, metric: str, found: str) -> None:
    with pytest.raises(TaskError, match=rf"found {found}") as caught:
        Task(linear(), (X, labels), metric=metric)
    assert "loss=torch.nn.BCEWithLogitsLoss(), metric='micro_f1'; for regression: loss=torch.nn." in str(caught.value)


def test_one_output_is_no_class() -> None:
    with pytest.raises(DataError, match=r"expected 0 \(the model has one output\)") as e:
        Task(nn.Linear(4, 1), (X, Y % 2), metric="loss")
    assert "for regression: loss=torch.nn.MSELoss(), metric='r2'" in str(e.value)


def test_accuracy_of_several_labels_is_refused_whatever_the_loss() -> None:
    several = (X[:, :3] > 0).float()
    with pytest.raises(DataError, match="multi-hot"):
        Task(linear(), (X, several), loss=lambda m, b: (m(b[0]) - b[1]).square().mean(1))


def test_what_the_text_says_works() -> None:
    several = (X[:, :3] > 0).float()
    Task(linear(), (X, several), loss=nn.BCEWithLogitsLoss(), metric="micro_f1").check_loss()
    task = Task(nn.Linear(4, 1), (X, X[:, 0]), loss=nn.MSELoss(), metric="r2")
    task.check_loss()
    assert task.score().value < 1


@pytest.mark.parametrize("metric", ["r2", "negative_mse", "negative_mae", "pearson", "spearman"])
def test_numbers_are_compared_with_float_targets(metric: str) -> None:
    options: dict[str, Any] = {"loss": lambda m, b: (m(b[0]) - b[1]).square(), "metric": metric}
    model = Plain(lambda logits: logits[:, 0])
    with pytest.raises(TaskError, match=rf'metric="{metric}": expected float targets, found int64 labels') as e:
        Task(model, (X, Y), **options)
    assert "y.float()" in str(e.value)
    assert Task(model, (X, Y.float()), **options).metric is METRICS[metric]


@pytest.mark.parametrize(
    ("labels", "metric", "found"),
    [
        (torch.zeros(60), "roc_auc", r"expected labels 0 and 1, both of them, found only \[0.0\]"),
        (Y, "roc_auc", "expected labels 0 and 1, both of them, found others"),
        (torch.ones(60), "pearson", r"expected targets that differ, found only \[1.0\]"),
        (torch.ones(60), "spearman", r"expected targets that differ, found only \[1.0\]"),
    ],
)
def test_labels_on_which_a_metric_has_no_value(labels: Tensor, metric: str, found: str) -> None:
    with pytest.raises(DataError, match=rf'labels of fit data for metric="{metric}": {found}'):
        Task(Plain(lambda x: x[:, 0]), (X, labels), loss=lambda m, b: m(b[0]).square(), metric=metric)


def test_token_labels_outside_the_vocabulary_are_named() -> None:
    data = sequences()
    data["labels"][9, 1] = VOCABULARY
    with pytest.raises(DataError, match=r"expected 0 to 6 .*, found 7 at index \(9, 1\) \(1 of 108 are"):
        Task(Tagger(), data, metric="loss")
