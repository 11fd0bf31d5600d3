"""Report data is touched once, after all decisions; a task that has looked at it decides nothing new."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stockpot import METHODS, Event, Task, compare, cook
from stockpot.errors import TaskError
from stockpot.pool import Pool
from stockpot.soup import Soup
from stockpot.soups import problem
from stockpot.soups.result import report_weights
from stockpot.task import Data
from stockpot.task.read_data import Columns
from zoo import fine_tunes, mlp, normed, samples, write, zoo

BRIEF: dict[str, Any] = {"steps": 3, "batch_size": 16}


class PoisonedError(Exception):
    pass


class Poisoned(Columns):
    """Samples that cannot be read, in any way there is, before the seal is broken."""

    def __init__(self, tree: Any, size: int) -> None:
        self.deadly = False
        self.looks = 0
        super().__init__(tree, size)

    @property
    def tree(self) -> Any:
        """What batches, labels and columns are all taken from."""
        self.looks += 1
        if self.deadly:
            raise PoisonedError
        return self._tree

    @tree.setter
    def tree(self, tree: Any) -> None:
        self._tree = tree


def poisoned(folder: Path, build: Any = mlp) -> tuple[Pool, Task, Poisoned]:
    store = Poisoned(samples(40, seed=5), 40)
    pool = write(folder, fine_tunes(build, 4))
    task = Task(build(), samples(), Data(store, name="report data"))  # labels and values are checked here
    store.deadly = True
    return pool, task, store


@pytest.mark.parametrize("build", [mlp, normed])
def test_a_soup_that_waits_for_the_report_is_the_one_that_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    loaded: list[Soup] = []
    load = Soup.load_into

    def counted(soup: Soup, model: torch.nn.Module) -> None:
        loaded.append(soup)
        load(soup, model)

    monkeypatch.setattr(Soup, "load_into", counted)
    found = []
    for part, times in ((problem.HELD, 1), (10**18, 2)):  # of memory: enough, nothing
        loaded.clear()
        monkeypatch.setattr(problem, "HELD", part)
        pool, task = zoo(tmp_path / str(part), build=build, report=samples(200, seed=7))
        found.append(compare(pool, task, ["uniform", "greedy", "hl+"], **BRIEF))
        assert len(loaded) == 3 * times
    for name, one in found[0].items():
        assert one.report is not None
        other = found[1][name].report
        assert other is not None
        assert torch.equal(one.report.table, other.table), name


@pytest.mark.parametrize("build", [mlp, normed])
@pytest.mark.parametrize("method", METHODS)
def test_no_decision_of_any_method_reads_it(tmp_path: Path, method: str, build: Any) -> None:
    pool, task, store = poisoned(tmp_path, build)
    before = store.looks

    def listen(event: Event) -> None:
        if event.kind == "unsealed":
            assert store.looks == before
            store.deadly = False

    result = cook(pool, task, method, listen=listen, **BRIEF)
    assert result.report is not None
    assert result.report.n == 40
    assert store.looks > before


def test_a_look_before_the_end_would_be_noticed(tmp_path: Path) -> None:
    """The poison works: without the antidote the final score is not reached."""
    pool, task, _ = poisoned(tmp_path)
    with pytest.raises(PoisonedError):
        cook(pool, task, "uniform")


def test_a_comparison_decides_everything_first(tmp_path: Path) -> None:
    pool, task, store = poisoned(tmp_path)
    kinds: list[str] = []

    def listen(event: Event) -> None:
        kinds.append(event.kind)
        if event.kind == "unsealed":
            assert event.data == {"decisions": len(METHODS), "samples": {"report": 40}}
            store.deadly = False

    results = compare(pool, task, METHODS, listen=listen, each={"crossfit": {"steps": 3}}, steps=3)
    assert kinds.count("unsealed") == 1
    assert kinds.count("cooked") == len(METHODS)
    assert "cooked" not in kinds[kinds.index("unsealed") :]
    assert all(result.report is not None for result in results.values())


def test_a_run_records_every_decision_first(tmp_path: Path) -> None:
    pool, task, store = poisoned(tmp_path / "pool")
    run = tmp_path / "run"

    def listen(event: Event) -> None:
        if event.kind == "unsealed":
            written = [json.loads(file.read_text()) for file in run.rglob("result.json")]
            assert {value["method"] for value in written} == set(METHODS)
            assert len(written) == event.data["decisions"] == len(METHODS)
            assert all(not value["reports"] for value in written)
            store.deadly = False

    fingerprint = Task.report_fingerprints

    def hashed(self: Task) -> dict[str, str]:
        store.deadly = False  # reads everything and tells nothing
        try:
            return fingerprint(self)
        finally:
            store.deadly = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "report_fingerprints", hashed)
        each = {"crossfit": BRIEF}
        compare(pool, task, METHODS, run=run, listen=listen, each=each, **BRIEF)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events].count("unsealed") == 1
    last_decision = max(i for i, event in enumerate(events) if event["kind"] == "cooked")
    assert last_decision < next(i for i, event in enumerate(events) if event["kind"] == "unsealed")


# Afterwards.


def reporting(folder: Path) -> tuple[Pool, Task]:
    return zoo(folder, report=samples(40, seed=5))


def test_a_task_that_has_looked_decides_nothing_new(tmp_path: Path) -> None:
    pool, task = reporting(tmp_path)
    cook(pool, task, "hl+", **BRIEF)
    events: list[Event] = []
    others: list[Callable[[], Any]] = [
        lambda: cook(pool, task, "crossfit", listen=events.append, **BRIEF),
        lambda: cook(pool, task, "hl+", **{**BRIEF, "lr": 0.2}),
        lambda: cook(pool, task, "hl+", exclude=["0.bias"], **BRIEF),
        lambda: cook(pool.subset([0, 1, 2]), task, "hl+", **BRIEF),
        lambda: cook(pool, task, "ensemble"),
    ]
    for again in others:
        with pytest.raises(TaskError) as caught:
            again()
        assert "this task's report data: expected to be looked at after the last decision" in str(caught.value)
        assert "make a new Task" in str(caught.value)
    both = compare(pool, task, ["hl+", "uniform"], **BRIEF)
    assert list(both) == ["hl+"]
    assert "expected to be looked at after the last decision" in both.failed["uniform"]
    assert not {"method", "step", "unsealed"} & {event.kind for event in events}  # said before hours of learning


def test_the_same_question_again_is_no_new_decision(tmp_path: Path) -> None:
    pool, task = reporting(tmp_path)
    first = compare(pool, task, ["hl+", "uniform", "ensemble"], **BRIEF)
    for method in first:
        again = cook(pool, task, method, **BRIEF)
        assert again.report is not None
        assert first[method].report is not None
        assert torch.equal(again.report.table, first[method].report.table)  # type: ignore[union-attr]


def test_without_report_data_a_task_serves_for_ever(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    for method in ("uniform", "hl+", "greedy"):
        assert cook(pool, task, method, **BRIEF).report is None


def test_weights_of_a_file_are_one_decision(tmp_path: Path) -> None:
    pool, task = reporting(tmp_path)
    scores = report_weights(task)["report"]
    assert torch.equal(report_weights(task)["report"].table, scores.table)
    with torch.no_grad():
        next(task.model.parameters()).add_(1.0)
    with pytest.raises(TaskError, match="a new decision"):
        report_weights(task)
    with pytest.raises(TaskError, match="a new decision"):
        cook(pool, task, "uniform")
