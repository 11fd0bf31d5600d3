"""Metrics against torchmetrics and seqeval, through whole tasks and in batches, on random data.

To 1e-9 where the other library computes in double precision. torchmetrics counts right and wrong in single precision
and adds an epsilon to Spearman's denominator; those are compared with scikit-learn and SciPy to 1e-9, here or in
test_metrics.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sklearn import metrics as reference
from torch import Tensor, nn

from stockpot.task import Metric, Task
from stockpot.task.language import entity_f1

measures = pytest.importorskip("torchmetrics")
seqeval = pytest.importorskip("seqeval.metrics")

NAMES = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]
SEEDS = [0, 1, 2, 3]


class Given(nn.Module):
    """Gives back what it is called with; the parameter is there to have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, given: Tensor) -> Tensor:
        return given * self.weight


class CausalLM(Given):  # of this name labels are those of the next position
    def forward(self, given: Tensor) -> Any:
        return {"logits": given * self.weight}


def value(metric: str | Metric, outputs: Tensor, batch: Any, loss: Any = None, model: type[Given] = Given) -> float:
    data = {"given": outputs, **batch} if isinstance(batch, dict) else (outputs, batch)
    return Task(model(), data, loss=loss, metric=metric, batch_size=7).score().value


def draws(seed: int, *shape: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64), generator


@pytest.mark.parametrize("seed", SEEDS)
def test_classes(seed: int) -> None:
    logits, generator = draws(seed, 60, 5)
    labels = torch.randint(0, 5, (60,), generator=generator)
    of = measures.classification
    for name, other in {
        "accuracy": of.MulticlassAccuracy(5, average="micro"),
        "balanced_accuracy": of.MulticlassAccuracy(5, average="macro"),
        "macro_f1": of.MulticlassF1Score(5, average="macro"),
        "micro_f1": of.MulticlassF1Score(5, average="micro"),
    }.items():
        assert value(name, logits, labels) == pytest.approx(float(other(logits, labels)), abs=1e-7)  # theirs is float32


@pytest.mark.parametrize("seed", SEEDS)
def test_areas_under_the_curve(seed: int) -> None:
    logits, generator = draws(seed, 50, 1)
    labels = torch.randint(0, 2, (50,), generator=generator)
    auc = measures.classification.BinaryAUROC()(logits[:, 0], labels)
    two = torch.cat([-logits / 2, logits / 2], dim=1)
    assert value("roc_auc", two, labels) == pytest.approx(float(auc), abs=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("average", ["macro", "micro"])
def test_several_labels(seed: int, average: str) -> None:
    logits, generator = draws(seed, 40, 4)
    labels = torch.randint(0, 2, (40, 4), generator=generator)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        cross_entropy = nn.functional.binary_cross_entropy_with_logits
        return cross_entropy(model(batch[0]), batch[1].double(), reduction="none").mean(1)

    other = measures.classification.MultilabelF1Score(4, average=average)(logits, labels)
    assert value(f"{average}_f1", logits, labels, loss) == pytest.approx(float(other), abs=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save")
def test_numbers(seed: int) -> None:
    outputs, generator = draws(seed, 50)
    targets = outputs + torch.randn(50, generator=generator, dtype=torch.float64)
    of = measures.regression

    def loss(model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) - batch[1]).square()

    for name, other, sign, near in (
        ("r2", of.R2Score(), 1, 1e-9),
        ("negative_mse", of.MeanSquaredError(), -1, 1e-9),
        ("negative_mae", of.MeanAbsoluteError(), -1, 1e-9),
        ("pearson", of.PearsonCorrCoef(), 1, 1e-9),
        ("spearman", of.SpearmanCorrCoef(), 1, 1e-6),
    ):
        expected = sign * float(other.set_dtype(torch.float64)(outputs, targets))
        assert value(name, outputs, targets, loss) == pytest.approx(expected, abs=near)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", [Given, CausalLM])
def test_tokens(seed: int, model: type[Given]) -> None:
    logits, generator = draws(seed, 20, 9, 11)
    labels = torch.randint(0, 11, (20, 9), generator=generator)
    labels[torch.rand(20, 9, generator=generator) < 0.3] = -100
    labels[:, 4] = 3  # each sequence has some
    size = torch.randint(5, 50, (20,), generator=generator)
    batch = {"labels": labels, "bytes": size}
    seen, wanted = (logits[:, :-1], labels[:, 1:]) if model is CausalLM else (logits, labels)
    perplexity = float(measures.text.Perplexity(ignore_index=-100).set_dtype(torch.float64)(seen, wanted))
    tokens = int((wanted != -100).sum())

    def found(name: str) -> float:
        return value(name, logits, batch, model=model)

    assert found("perplexity") == pytest.approx(-perplexity, rel=1e-9)
    assert found("nats_per_token") == pytest.approx(-math.log(perplexity), abs=1e-9)
    assert found("bits_per_byte") == pytest.approx(-math.log2(perplexity) * tokens / int(size.sum()), abs=1e-9)
    known, said = wanted != -100, seen.argmax(2)
    for name, average in (("token_accuracy", "micro"), ("token_f1", "macro")):
        of = measures.classification.MulticlassF1Score(11, average=average, ignore_index=-100)
        assert found(name) == pytest.approx(float(of(seen.flatten(0, 1), wanted.flatten())), abs=1e-7)
        expected = reference.f1_score(wanted[known], said[known], average=average)
        assert found(name) == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_entities(seed: int) -> None:
    logits, generator = draws(seed, 30, 12, len(NAMES))
    labels = torch.randint(0, len(NAMES), (30, 12), generator=generator)
    logits = logits + 2 * nn.functional.one_hot(labels, len(NAMES))
    labels[torch.rand(30, 12, generator=generator) < 0.2] = -100
    said, true = (
        [[NAMES[tag] for tag in row[kept].tolist()] for row, kept in zip(tags, labels != -100, strict=True)]
        for tags in (logits.argmax(2), labels)
    )
    expected = seqeval.f1_score(true, said)
    assert value(entity_f1(NAMES), logits, {"labels": labels}) == pytest.approx(float(expected), abs=1e-9)
