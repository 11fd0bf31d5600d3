"""The examples of tasks of one's own run, are as short as promised, and stand in the documentation as they are."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from stockpot import Task

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "examples" / "tasks"
# What a soup must reach on report data: well above what guessing gives, a little below what was seen.
FLOORS = {
    "regression": 0.4,
    "multi_label": 0.7,
    "segmentation": 0.7,
    "contrastive": 0.5,
    "several_inputs": 0.8,
    "survival": 0.8,
    "diffusion": -0.45,  # predicting no noise at all gives -1
}


def users_part(name: str) -> str:
    return (TASKS / f"{name}.py").read_text().split("# Your part\n", 1)[1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(TASKS))
    return lambda name: runpy.run_path(str(TASKS / f"{name}.py"))


def test_every_example_is_tested() -> None:
    assert {path.stem for path in TASKS.glob("*.py")} == {"fine_tunes", *FLOORS}


@pytest.mark.parametrize("name", FLOORS)
def test_the_users_part_has_at_most_fifteen_lines(name: str) -> None:
    lines = [line for line in users_part(name).splitlines() if line.strip()]
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", FLOORS)
def test_the_documentation_shows_what_is_run(name: str) -> None:
    page = (ROOT / "docs" / "your-own-task.md").read_text()
    assert f"```python\n{users_part(name).strip()}\n```" in page
    assert f"(../examples/tasks/{name}.py)" in page


@pytest.mark.parametrize("name", FLOORS)
def test_the_example_builds_a_soup_with_a_sane_score(name: str, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "regression":
        pytest.importorskip("sklearn")
    names = run(name)
    result, task = names["result"], names["task"]
    assert FLOORS[name] < result.report.value < 1
    low, high = result.report.interval()
    assert low < result.report.value < high
    assert result.soup.W.shape[0] == 6
    assert "on report data" in capsys.readouterr().out
    # The model holds the soup: a new task with the same data finds the same score.
    again = Task(task.model, names.get("fit") or names["with_draws"](names["x_fit"]), **_judged(names, task))
    assert again.score().value == pytest.approx(result.fit.value, abs=1e-6)


def _judged(names: dict[str, Any], task: Task) -> dict[str, Any]:
    return {"loss": names.get("loss"), "metric": task.metric, "batch_size": task.batch_size}


def test_noise_is_fixed_by_the_sample_whatever_the_batches(run: Any) -> None:
    names = run("diffusion")
    data = names["with_draws"](names["x_report"])
    few, many = (
        Task(names["model"], data, loss=names["loss"], metric="loss", batch_size=size).score().table
        for size in (7, 400)
    )
    assert torch.allclose(few, many, atol=1e-6)


def test_recall_looks_for_the_partner_in_the_whole_set(run: Any) -> None:
    names = run("contrastive")
    small, large = (
        Task(names["model"], names["fit"], loss=names["loss"], metric=names["recall_at_1"], batch_size=size).score()
        for size in (10, 200)
    )
    assert small.value == pytest.approx(large.value)
    among_ten = [names["recall"](piece) for piece in large.table.split(10)]  # type: ignore[no-untyped-call]
    assert sum(among_ten) / len(among_ten) > large.value  # which is easier
