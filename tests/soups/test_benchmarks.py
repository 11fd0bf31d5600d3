"""Report data that asks the model in its own way and has its own metric, beside data that is judged as usual."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stockpot import Metric, Pool, Task, compare
from stockpot.errors import TaskError
from stockpot.report import summary_rows, write_report
from stockpot.table import as_markdown
from stockpot.task.metric import Benchmark

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Questions(Benchmark):
    """Whether the first output is the largest, asked one by one."""

    metric = Metric("acc_norm", lambda outputs, batch: outputs, is_mean=True, percent=True)

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def __len__(self) -> int:
        return 20

    def fingerprint(self) -> str:
        return "twenty questions"

    def check(self, model: nn.Module, autocast: torch.dtype | None) -> None:
        if not isinstance(model, nn.Linear):
            raise TaskError("no model for questions")
        self.asked.append(False)

    def table(self, model: nn.Module, autocast: torch.dtype | None, listen: Any) -> Tensor:
        self.asked.append(torch.is_grad_enabled() or model.training)
        right: Tensor = model(X[:20]).argmax(1) == 0
        return right.double()[:, None]


def compared(run: Path) -> tuple[Any, Questions]:
    torch.manual_seed(0)
    pool = Pool.open([nn.Linear(3, 2).state_dict() for _ in range(3)])
    questions = Questions()
    task = Task(nn.Linear(3, 2), (X[:30], Y[:30]), {"test": (X[30:], Y[30:]), "asked": questions}, metric="loss")
    return compare(pool, task, ["best", "uniform", "ensemble"], run=run), questions


def test_each_set_is_shown_in_its_own_metric(tmp_path: Path) -> None:
    found, questions = compared(tmp_path / "run")
    assert questions.asked == [False] * 3  # tried once, then asked of two soups, without gradients
    assert found.absent == {"ensemble": "report data 'asked', which calls the model itself"}
    uniform = found["uniform"]
    with torch.no_grad():
        share = float(
            (uniform.soup.load_into(model := nn.Linear(3, 2)) or model)(X[:20]).argmax(1).eq(0).double().mean()
        )
    assert uniform.reports["asked"].value == pytest.approx(share)
    first, second = (row["metric"] for row in uniform.table())
    assert (first, second) == ("loss", "acc_norm")
    heading, line = repr(found).splitlines()[0], next(x for x in repr(found).splitlines() if "uniform" in x)
    assert "test, loss (negated)" in heading
    assert "asked, acc norm" in heading
    assert f"{100 * share:.2f} %" in line
    assert line.count("%") == 1
    if found.verdict.startswith("Use"):
        assert "points" not in found.verdict.splitlines()[0]


def test_the_page_and_a_continued_run_know_the_metric_too(tmp_path: Path) -> None:
    first, _ = compared(tmp_path / "run")
    again, questions = compared(tmp_path / "run")
    assert again.reused == ("best", "uniform")
    assert questions.asked == [False]  # nothing was scored again
    assert repr(again) == repr(first)
    text, html = "\n".join(as_markdown(summary_rows(tmp_path / "run"))), write_report(tmp_path / "run").read_text()
    assert "| asked, acc norm |" in text
    assert "loss (negated) on test, acc norm (%) on asked" in text
    assert "asked, acc norm<small>" in html
    assert json.loads((tmp_path / "run/run.json").read_text())["report_metrics"] == {
        "asked": {"metric": "acc_norm", "unit": "%"}
    }


def test_a_model_that_cannot_be_asked_is_refused_with_the_task() -> None:
    with pytest.raises(TaskError, match="no model for questions"):
        Task(nn.Sequential(nn.Linear(3, 2)), (X, Y), {"asked": Questions()})


def test_it_has_no_groups() -> None:
    with pytest.raises(TaskError, match="report_groups: expected sets of samples, found a benchmark in 'asked'"):
        Task(nn.Linear(3, 2), (X, Y), {"asked": Questions()}, report_groups={"asked": [0] * 20})
