"""A run decides everything before it looks at the report data, and goes on as if it had never been stopped."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stockpot import METHODS, Comparison, compare, cook, files
from stockpot.errors import LearningError, LinkError, MethodError, RunError, SoupError, TaskError
from stockpot.events import Event, ignore
from stockpot.pool import Pool, TensorSpec, open_checkpoint
from stockpot.run.directory import RecipeFacts
from stockpot.run.job import SMALL, threads_for
from stockpot.run.rebuild import rebuild_soup, recommended_soup
from stockpot.run.record import read_run, slug
from stockpot.soups.registry import settings_for
from stockpot.task import Metric, Task
from torture.evidence import facts, read_events
from zoo import fine_tunes, marked, mlp, normed, same, samples, write, zoo

FEW = ("best", "uniform", "greedy", "ensemble", "hl+", "crossfit")
SHORT: dict[str, Any] = {"steps": 6, "each": {"crossfit": {"steps": 6}}}


@pytest.fixture(autouse=True)
def _saves_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stockpot.run.state.INTERVAL", 0.0)


def toy(path: Path, count: int = 4, build: Callable[[], torch.nn.Module] = mlp) -> tuple[Pool, Task]:
    return zoo(path / "pool", count, build=build, report=samples(60, seed=5))


def again(build: Callable[[], torch.nn.Module] = mlp, **options: Any) -> Task:
    """The same task as a new process makes it, its report data sealed."""
    return Task(build(), samples(), report=samples(60, seed=5), **options)


def value_of(run: Path, name: str) -> Any:
    return json.loads((run / name).read_text())


@pytest.mark.parametrize("recorded", [False, True])
def test_a_model_from_another_start_is_named(tmp_path: Path, recorded: bool) -> None:
    models = fine_tunes(mlp, 3)
    stranger = {name: -value for name, value in models[0].items()}
    heard: list[Event] = []
    run = tmp_path / "run" if recorded else None
    pool = Pool.open(*models, stranger)
    cook(pool, again(), "uniform", run=run, listen=heard.append)
    assert (pool.facts(measured=False).measured is not None) == recorded, "distances are measured for a record alone"
    assert [event.data["names"] for event in heard if event.kind == "strangers"] == [["state dict 4"]]
    heard.clear()
    compare(Pool.open(*models), again(), ["uniform"], listen=heard.append)
    assert "strangers" not in {event.kind for event in heard}


# What is there in the end --------------------------------------------------------------------------------


def test_the_record_is_complete(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    compared = compare(pool, task, METHODS, run=tmp_path / "run", **SHORT)
    found = read_run(tmp_path / "run")
    assert list(compared) == found.results["methods"] == list(METHODS)
    assert found.results["baseline"] == "best"
    assert found.results["recommended"] == compared.recommended
    assert found.about["status"] == "done"
    assert [entry["name"] for entry in found.pool["ingredients"]] == list(pool.names)
    assert all(0 <= entry["fit"]["value"] <= 1 for entry in found.pool["ingredients"])
    for method in found.methods:
        arrays = load_file(method.folder / "weights.safetensors")
        assert method.scores["report"]["n"] == len(arrays["report_table"]) == 60
        assert (method.W is None) == (method.name == "ensemble")
        assert (method.folder / "soup.json").exists() == (method.name != "ensemble")
    by_name = {method.name: method.result for method in found.methods}
    assert set(by_name["crossfit"]["guard"]["held_out"]) == {"learned", "best", "uniform"}
    assert len(by_name["greedy"]["greedy"]) == 4
    assert compared.path == tmp_path / "run"
    assert compared.soup is not None
    assert (compared.soup / "model.safetensors").exists()
    assert not list((tmp_path / "run").rglob("state.safetensors"))


@pytest.mark.parametrize("build", [mlp, normed])
def test_a_run_gives_what_python_gives(tmp_path: Path, build: Callable[[], torch.nn.Module]) -> None:
    pool, task = toy(tmp_path, build=build)
    recorded = cook(pool, task, "hl+", steps=6, run=tmp_path / "run")
    direct = cook(pool, again(build), "hl+", steps=6)
    assert recorded.soup is not None
    assert direct.soup is not None
    assert direct.report is not None
    assert recorded.report is not None
    assert torch.equal(recorded.soup.W, direct.soup.W)
    path = recommended_soup(tmp_path / "run")
    assert same(load_file(path / "model.safetensors"), direct.soup.state_dict())
    opened = open_checkpoint(path)  # also when statistics lie beside the weights
    assert same({name: opened.tensor(name) for name in opened.specs}, direct.soup.state_dict())
    assert torch.equal(recorded.report.table, direct.report.table)
    assert recorded.report.loss == direct.report.loss


def test_a_comparison_is_the_same_with_and_without_a_directory(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    plain = compare(pool, task, FEW, folds=2, **SHORT)
    recorded = compare(pool, again(), FEW, folds=2, run=tmp_path / "run", **SHORT)
    facts = RecipeFacts(title="t", kind="compare", digest="d", resolved={"method": {"folds": 2}})
    by_recipe = compare(pool, again(), FEW, folds=2, run=tmp_path / "recipe", recipe=facts, **SHORT)
    reused = compare(pool, again(), FEW, folds=2, run=tmp_path / "run", **SHORT)
    assert reused.reused == FEW
    for other in (recorded, by_recipe, reused):
        assert list(other) == list(plain)
        assert (other.recommended, other.verdict) == (plain.recommended, plain.verdict)
        for name, result in plain.items():
            assert result.report is not None
            assert other[name].report is not None
            assert torch.equal(other[name].report.table, result.report.table)  # type: ignore[union-attr]
            if result.soup is not None:
                assert torch.equal(other[name].soup.W, result.soup.W)  # type: ignore[union-attr]
    assert plain["hl+"].held_out is not None  # folds reach every learned method
    assert value_of(tmp_path / "recipe", "recipe.yaml") == {"method": {"folds": 2}}


def test_shards_are_as_large_as_asked_for(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    facts = RecipeFacts(kind="cook", digest="d", max_shard=200)
    cook(pool, task, "uniform", run=tmp_path / "run", recipe=facts)
    assert len(list(recommended_soup(tmp_path / "run").glob("*.safetensors"))) > 1
    assert rebuild_soup(tmp_path / "run")[1]  # compared, byte by byte


def test_any_soup_of_a_run_can_be_rebuilt(tmp_path: Path) -> None:
    pool, task = toy(tmp_path, build=normed)
    compared = compare(pool, task, ["best", "hl+", "crossfit"], run=tmp_path / "run", **SHORT)
    assert compared.soup is not None
    before = (compared.soup / "model.safetensors").read_bytes()
    assert rebuild_soup(tmp_path / "run") == (compared.soup, True)
    assert sorted(path.name for path in compared.soup.parent.iterdir()) == sorted(
        ["result.json", "soup", "soup.json", "statistics.safetensors", "weights.safetensors"]
    )
    path, _ = rebuild_soup(tmp_path / "run", out=tmp_path / "again")
    assert (path / "model.safetensors").read_bytes() == before
    rebuild_soup(tmp_path / "run", method="hl+", out=tmp_path / "hl")
    assert (tmp_path / "hl" / "model.safetensors").read_bytes() != before
    with pytest.raises(RunError, match=r"expected one that made a soup: best, crossfit, hl\+, found none"):
        rebuild_soup(tmp_path / "run", method="mehl")


def test_a_run_without_held_out_evidence_recommends_and_saves_nothing(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    compared = compare(pool, task, ["best", "uniform", "hl+"], run=tmp_path / "run", **SHORT)
    assert (compared.recommended, compared.soup) == (None, None)
    assert "No method is recommended" in compared.verdict
    with pytest.raises(RunError, match="expected a run that recommends a soup, found one that recommends none"):
        rebuild_soup(tmp_path / "run")
    assert rebuild_soup(tmp_path / "run", method="hl+")[0].is_dir()


def test_what_was_asked_for_by_name_is_saved_with_the_best_single_model_beside_it(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    cook(pool, task, "greedy", run=tmp_path / "run")
    results = read_run(tmp_path / "run").results
    assert results["methods"] == ["best", "greedy"]
    assert results["recommended"] == "greedy"
    assert recommended_soup(tmp_path / "run").parent.name == "greedy"


def test_identical_ingredients_and_no_report_data_still_make_a_record(tmp_path: Path) -> None:
    states = fine_tunes(mlp, 2)
    pool = write(tmp_path / "pool", [states[0], states[1], states[1]])
    compared = compare(pool, Task(mlp(), samples()), ["best", "crossfit"], run=tmp_path / "run", **SHORT)
    assert "no report data was given" in compared.verdict
    pairs = value_of(tmp_path / "run", "pool.json")["distances"]
    assert pairs[1][2] == 0.0 != pairs[0][1]


# The report data -----------------------------------------------------------------------------------------


def test_every_decision_comes_before_the_report_data(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    events: list[Event] = []
    compare(pool, task, FEW, run=tmp_path / "run", listen=events.append, **SHORT)
    kinds = [event.kind for event in events if event.kind in ("cooked", "report")]
    assert kinds == sorted(kinds)  # all "cooked", then all "report"
    assert kinds.count("cooked") == kinds.count("report") == len(FEW)


def test_several_sets_are_opened_once_and_recorded_each(tmp_path: Path) -> None:
    pool, _ = toy(tmp_path)
    sets = {"test": samples(60, seed=5), "shifted": samples(50, seed=6)}
    events: list[Event] = []
    few = ["best", "uniform", "ensemble"]
    found = compare(pool, Task(mlp(), samples(), sets), few, run=tmp_path / "run", listen=events.append)
    (opened,) = [event for event in events if event.kind == "unsealed"]
    assert opened.data == {"decisions": 3, "samples": {"test": 60, "shifted": 50}}
    assert found["uniform"].report is found["uniform"].reports["test"]
    record = read_run(tmp_path / "run")
    assert record.results["differences"]["uniform"].keys() == {"test", "shifted"}
    for method in record.methods:
        assert {name: one["n"] for name, one in method.result["reports"].items()} == {"test": 60, "shifted": 50}
    once_more = compare(pool, Task(mlp(), samples(), sets), few, run=tmp_path / "run")
    assert once_more.reused == tuple(few)
    assert torch.equal(once_more["uniform"].reports["shifted"].table, found["uniform"].reports["shifted"].table)
    turned = Task(mlp(), samples(), dict(reversed(sets.items())))
    with pytest.raises(RunError, match=r"sets of report data in the same order[\s\S]*test, shifted -> shifted, test"):
        compare(pool, turned, few, run=tmp_path / "run")


def test_an_ensemble_without_a_meaning_is_left_out_with_the_reason(tmp_path: Path) -> None:
    pool, _ = toy(tmp_path)

    def loss(model: torch.nn.Module, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    found = compare(pool, again(metric="loss", loss=loss), ["best", "ensemble"], run=tmp_path / "run")
    reason = "a loss of your own as the metric, which calls the model itself"
    assert (list(found), found.failed, found.absent) == (["best"], {}, {"ensemble": reason})
    assert value_of(tmp_path / "run", "results.json")["absent"] == {"ensemble": reason}
    with pytest.raises(TaskError, match="outputs that can be averaged"):
        compare(pool, again(metric="loss", loss=loss), ["ensemble"])


def test_a_run_whose_report_data_was_looked_at_takes_no_further_method(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    compare(pool, task, ["best"], run=tmp_path / "run")
    with pytest.raises(RunError, match=r"uniform\.\w+: not there -> "):
        compare(pool, again(), ["best", "uniform"], run=tmp_path / "run")


# Stopped and continued -----------------------------------------------------------------------------------


def test_finished_methods_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = toy(tmp_path)
    compare(pool, task, FEW, run=tmp_path / "run", **SHORT)
    before = facts(tmp_path / "run")

    def never(*args: object, **options: object) -> None:
        raise AssertionError("cooked or scored again")

    monkeypatch.setattr("stockpot.run.job.decided", never)
    monkeypatch.setattr("stockpot.run.job.report_on", never)
    assert compare(pool, again(), FEW, run=tmp_path / "run", **SHORT).reused == FEW
    assert facts(tmp_path / "run") == before


@pytest.mark.parametrize("build", [mlp, normed])
@pytest.mark.parametrize("stop_at", [1, 17, 40, 1000])
def test_a_stopped_run_continues_bit_for_bit(
    tmp_path: Path, stop_at: int, build: Callable[[], torch.nn.Module]
) -> None:
    pool, task = toy(tmp_path, build=build)
    compare(pool, task, FEW, run=tmp_path / "whole", **SHORT)
    heard = 0

    def stop(event: Event) -> None:
        nonlocal heard
        heard += event.kind in ("step", "held_out", "report", "greedy")
        if heard == stop_at:
            heard += 1
            raise KeyboardInterrupt

    stops = 0
    while True:
        try:
            compare(pool, again(build), FEW, run=tmp_path / "parts", listen=stop, **SHORT)
            break
        except KeyboardInterrupt:
            stops += 1
            assert value_of(tmp_path / "parts", "run.json")["status"] == "interrupted"
            states = [path.name for path in (tmp_path / "parts").rglob("state*")]  # one, where there is one process
            assert states == ["state.safetensors"][: len(states)]
            assert states or stop_at < 40
    assert stops == (stop_at != 1000)
    assert facts(tmp_path / "parts") == facts(tmp_path / "whole")


@pytest.mark.parametrize(
    "moment",
    [
        "stockpot.run.record.write_ingredient_scores",
        "stockpot.run.record.write_method",
        "stockpot.run.state.DiskStore.clear",
        "stockpot.run.state.DiskStore.save",
        "stockpot.run.record.write_report_scores",
        "stockpot.soup.soup.Soup.save",
        "stockpot.files.write_json",
        "stockpot.files.write_bytes",
    ],
)
def test_a_run_stopped_between_two_files_ends_with_the_same_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    pool, task = toy(tmp_path)
    options: dict[str, Any] = {"methods": ["mehl+", "greedy"], "steps": 4, "block_size": 2, "folds": 2}
    compare(pool, task, run=tmp_path / "whole", **options)
    for turn in range(1, 9):
        turns = iter(range(1, 10**6))
        original = _found(moment)

        def stop(*args: Any, **given: Any) -> Any:
            if next(turns) == turn:  # noqa: B023  (called within this turn)
                raise KeyboardInterrupt
            return original(*args, **given)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(moment, stop)
            with contextlib.suppress(KeyboardInterrupt):
                compare(pool, again(), run=tmp_path / "parts", **options)
    compare(pool, again(), run=tmp_path / "parts", **options)
    assert facts(tmp_path / "parts") == facts(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["fit", "report"])
def test_a_kill_between_a_table_and_its_score_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """weights.safetensors is written before result.json, and then holds what nobody speaks of yet."""
    pool, task = toy(tmp_path)
    compare(pool, task, FEW, run=tmp_path / "whole", **SHORT)
    write_json = files.write_json
    for name in FEW:

        def killed(path: Path, value: Any, root: Path) -> None:
            if path.name == "result.json" and value["method"] == name and (not value["reports"]) == (kind == "fit"):  # noqa: B023
                raise KeyboardInterrupt
            write_json(path, value, root)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr("stockpot.files.write_json", killed)
            compare(pool, again(), FEW, run=tmp_path / "parts", **SHORT)
    compare(pool, again(), FEW, run=tmp_path / "parts", **SHORT)
    assert facts(tmp_path / "parts") == facts(tmp_path / "whole")


def test_a_damaged_record_of_one_method_stops_the_run(tmp_path: Path) -> None:
    """It must not look as if that method had failed."""
    pool, task = toy(tmp_path)
    compare(pool, task, ["best", "uniform"], run=tmp_path / "run")
    result = tmp_path / "run" / "methods" / "uniform" / "result.json"
    result.write_text(result.read_text().replace('"n": 48', '"n": 47'))
    with pytest.raises(RunError, match=r"more samples than in result\.json, or fewer"):
        compare(pool, again(), ["best", "uniform"], run=tmp_path / "run")
    result.write_text(result.read_text().replace('"n": 47', '"n": 48'))
    soup = result.with_name("soup.json")
    before = json.loads(soup.read_text())
    soup.write_text(json.dumps({**before, "about": {"method": "uniform"}}))
    with pytest.raises(RunError, match=r"another method or other settings in soup\.json"):
        compare(pool, again(), ["best", "uniform"], run=tmp_path / "run")
    soup.write_text("{}")
    with pytest.raises(RunError, match=r"soup\.json: expected a soup record of format 1"):
        compare(pool, again(), ["best", "uniform"], run=tmp_path / "run")


def _found(path: str) -> Any:
    """The function that a dotted path names; the path leads through modules and then maybe a class."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(_found(module), name)


def test_seconds_and_peak_memory_are_those_of_all_processes(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    slept = 0

    def slow(event: Event) -> None:
        nonlocal slept
        if event.kind == "step":
            time.sleep(0.02)
            slept += 1
            if slept == 20:
                raise KeyboardInterrupt

    ballast = torch.zeros(30_000_000).fill_(1.0)
    with pytest.raises(KeyboardInterrupt):
        cook(pool, task, "mehl+", steps=8, block_size=1, run=tmp_path / "run", listen=slow)
    high = ballast.nbytes
    del ballast
    result = cook(pool, again(), "mehl+", steps=8, block_size=1, run=tmp_path / "run")
    assert result.seconds > 0.3  # of sixteen steps and more in the first process
    assert result.peak_host > high
    assert value_of(tmp_path / "run", "methods/mehl-plus/result.json")["peak_host"] == result.peak_host


def test_a_jumping_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = toy(tmp_path)
    methods = ("greedy", "mehl+", "crossfit")
    compare(pool, task, methods, run=tmp_path / "steady", **SHORT)
    jumps = itertools.cycle((0.0, 4e9, 1.0, 1.7e9, -5.0))
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(next(jumps) * 1e9))
    compare(pool, again(), methods, run=tmp_path / "jumping", **SHORT)
    assert facts(tmp_path / "jumping") == facts(tmp_path / "steady")
    moments = [event["time"] for event in read_events(tmp_path / "jumping" / "events.jsonl")]
    assert moments != sorted(moments)  # it did jump
    for file in (tmp_path / "jumping").glob("methods/*/result.json"):
        assert 0 <= json.loads(file.read_text())["seconds"] < 600


# Refused -------------------------------------------------------------------------------------------------


def test_other_ingredients_data_settings_and_options_are_refused(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)

    def cooked(pool: Pool = pool, task: Task | None = None, **given: Any) -> Comparison:
        return compare(pool, task or again(), ["best", "hl+"], run=tmp_path / "run", **{"steps": 6, **given})

    compare(pool, task, ["best", "hl+"], steps=6, run=tmp_path / "run")
    before = facts(tmp_path / "run")
    other_report = Task(mlp(), samples(), report=samples(60, seed=6))
    for given, found in (
        ({"task": Task(mlp(), samples(seed=3), report=samples(60, seed=5))}, r"fitting data .* found other samples"),
        ({"task": other_report}, r"report data this run was started with, found other samples"),
        ({"task": again(metric="loss")}, r"metric: accuracy -> loss"),
        ({"lr": 0.5}, r"hl\+\.lr: 0\.01 -> 0\.5"),
        ({"seed": 1}, r"best\.seed: 0 -> 1"),
        ({"preset": "authors"}, r"hl\+\.preset: not there -> authors"),
        ({"donor": 1}, r"layout\.donor: 0 -> 1"),
        ({"exclude": ["2.*"]}, r"layout\.exclude\.0: not there -> 2\.\*"),
    ):
        with pytest.raises(RunError, match=found):
            cooked(**given)
        assert facts(tmp_path / "run") == before
    changed = load_file(tmp_path / "pool" / "model_1.safetensors")
    changed["0.bias"] += 1
    save_file(changed, tmp_path / "pool" / "model_1.safetensors")
    with pytest.raises(RunError, match=r"found others[\s\S]*model_1: other content"):
        cooked(pool=Pool.open(tmp_path / "pool"))


def test_what_cannot_be_is_refused_while_an_earlier_run_is_still_there(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    cook(pool, task, "uniform", run=tmp_path / "run")
    before = facts(tmp_path / "run")
    for given, found in (
        ({"method": "mehl", "block_size": 9}, "setting block_size: expected at most K"),
        ({"method": "crossfit", "folds": 1000}, "at least 2000 samples for 1000 folds"),
        ({"method": "hl", "lr": -1.0}, "setting lr"),
        ({"method": "hll"}, "did you mean 'hl'"),
    ):
        with pytest.raises((MethodError, TaskError), match=found):
            cook(pool, again(), run=tmp_path / "run", overwrite=True, **given)
        assert facts(tmp_path / "run") == before


# One method's failure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [False, True])
def test_a_method_that_fails_does_not_cost_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    pool, task = toy(tmp_path)
    decided = importlib.import_module("stockpot.run.job").decided

    def failing(problem: Any, name: str, *rest: Any) -> Any:
        if name == "mehl":
            raise LearningError("every step was skipped")
        return decided(problem, name, *rest)

    monkeypatch.setattr("stockpot.run.job.decided", failing)
    heard: list[Event] = []
    run = {"run": tmp_path / "run"} if recorded else {}
    compared = compare(pool, task, ["best", "mehl", "uniform"], listen=heard.append, **run, **SHORT)  # type: ignore[arg-type]
    assert list(compared) == ["best", "uniform"]
    assert compared.failed == {"mehl": "every step was skipped"}
    assert [event.data["method"] for event in heard if event.kind == "failed"] == ["mehl"]
    if recorded:
        assert value_of(tmp_path / "run", "results.json")["failed"] == compared.failed
    with pytest.raises(LearningError, match="every step"):  # where nothing is left, the error itself
        compare(pool, again(), ["mehl"], **SHORT)
    with pytest.raises(LearningError, match="every step"):
        cook(pool, again(), "mehl", steps=6, run=tmp_path / "cooked")


def nan_for_one(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """An accuracy that one ingredient, known by its outputs, has none of."""
    right = (outputs.argmax(dim=1) == batch[1]).double()
    return torch.where(outputs[:, 0] > 50, torch.full_like(right, math.nan), right)


def test_a_score_that_is_nan_neither_wins_nor_breaks_the_record(tmp_path: Path) -> None:
    """Before, argmax preferred NaN, and the run failed on JSON at every retry."""
    states = fine_tunes(mlp, 4)
    states[2]["2.bias"][0] += 1000
    pool = write(tmp_path / "pool", states)
    task = Task(mlp(), samples(), report=samples(60, seed=5), metric=nan_for_one)
    compared = compare(pool, task, ["best", "uniform", "greedy", "crossfit"], run=tmp_path / "run", **SHORT)
    assert not compared.failed
    best = compared["best"].soup
    assert best is not None
    assert best.W[2].sum() == 0
    found = read_run(tmp_path / "run")
    assert found.pool["ingredients"][2]["fit"]["value"] is None
    assert found.about["status"] == "done"
    for file in (tmp_path / "run").rglob("*.json*"):
        assert "NaN" not in file.read_text()
        assert "Infinity" not in file.read_text()


def test_all_scores_nan_still_make_a_record(tmp_path: Path) -> None:
    pool, _ = toy(tmp_path)
    never = Metric("never", lambda outputs, batch: outputs[:, :1].double(), lambda table: math.nan)
    task = Task(mlp(), samples(), report=samples(60, seed=5), metric=never)
    compared = compare(pool, task, ["best", "uniform", "greedy", "hl"], run=tmp_path / "run", **SHORT)
    assert compared.recommended is None
    assert read_run(tmp_path / "run").results["held_out"] == {}


def test_a_held_out_loss_that_is_not_finite_is_a_gap_in_the_curve(tmp_path: Path) -> None:
    pool, _ = toy(tmp_path)
    compared = compare(pool, marked(1), ["best", "crossfit"], batch_size=8, run=tmp_path / "run", **SHORT)
    assert not compared.failed
    record = read_run(tmp_path / "run").methods[1]
    losses = [loss for curve in record.result["curves"]["held_out"] for loss in curve["loss"]]
    assert None in losses
    assert any(loss is not None for loss in losses)


# Links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "methods", "methods/greedy", "methods/greedy/soup", "methods/greedy/result.json",
        "methods/greedy/weights.safetensors", "methods/greedy/soup.json", "methods/best/state.safetensors",
        "pool.json", "results.json", "events.jsonl", "ingredients.safetensors", "run.json", ".lock",
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", ["new", "interrupted", "finished"])
@pytest.mark.parametrize("target", ["file", "folder", "nothing"])
def test_no_link_in_a_run_directory_is_followed(tmp_path: Path, name: str, stage: str, target: str) -> None:
    pool, _ = toy(tmp_path, 3)
    run, outside = tmp_path / "run", tmp_path / "outside"
    (outside / "folder" / "greedy").mkdir(parents=True)
    for file in ("file", "folder/x", "folder/result.json", "folder/greedy/result.json", "folder/state.safetensors"):
        (outside / file).write_text("what only the user has")
    before = sorted((str(p), p.read_bytes() if p.is_file() else b"") for p in outside.rglob("*"))

    def cooked(**given: Any) -> None:
        compare(pool, again(), ["best", "greedy"], run=run, **given)
        rebuild_soup(run, method="greedy")

    def stop(event: Event) -> None:
        if event.kind == "greedy":
            raise KeyboardInterrupt

    if stage != "new":
        with contextlib.suppress(KeyboardInterrupt):
            cooked(listen=stop if stage == "interrupted" else ignore)
    place = run / name
    if place.is_dir():
        place.rename(tmp_path / "aside")
    else:
        place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(outside / target)
    for overwrite in (False, True):
        with contextlib.suppress(RunError, LinkError, SoupError):
            cooked(overwrite=overwrite)
        assert sorted((str(p), p.read_bytes() if p.is_file() else b"") for p in outside.rglob("*")) == before
        assert not (outside / "nothing").exists()


def test_what_is_no_text_can_be_recorded(tmp_path: Path) -> None:
    """Arguments and file names may hold any bytes; Python has lone surrogates for those that are no UTF-8."""
    pool, task = toy(tmp_path, 2)
    facts = RecipeFacts("\udcff", "compare", ("stockpot", os.fsdecode(b"\xff")))
    run = tmp_path / "run"
    compare(pool, task, ["best"], run=run, recipe=facts, listen=ignore)
    assert value_of(run, "run.json")["command"] == ["stockpot", "\udcff"]
    assert read_run(run).about["command"] == ["stockpot", "\ufffd"]
    assert compare(pool, again(), ["best"], run=run, recipe=facts).reused == ("best",)


def test_settings_are_noted_as_they_were_used(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    compare(pool, task, ["uniform", "mehl+"], steps=6, block_size=2, run=tmp_path / "run")
    noted = read_run(tmp_path / "run").about["settings"]
    assert noted["mehl+"]["block_size"] == 2
    assert noted["mehl+"]["steps"] == 6
    assert noted["uniform"]["granularity"] == settings_for("uniform").granularity
    assert slug("mehl+") == "mehl-plus"


def test_numbers_for_other_methods_do_not_reach_crossfit(tmp_path: Path) -> None:
    """Before, steps, epochs and block_size of a recipe's comparison made crossfit another method."""
    pool, task = toy(tmp_path)
    given: dict[str, Any] = {"steps": 3, "block_size": 2, "lr": 0.5, "weight_decay": 0.7, "passes": 2}
    compare(pool, task, ["mehl+", "crossfit"], run=tmp_path / "run", each={"crossfit": {"steps": 5}}, **given)
    noted = read_run(tmp_path / "run").about["settings"]
    own = settings_for("crossfit", steps=5)
    for key in (*given, "epochs", "blocks"):
        assert noted["crossfit"][key] == getattr(own, key)
        if key in given:
            assert noted["mehl+"][key] == given[key]


def test_a_set_of_report_data_that_a_record_lost_is_scored_again(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path / "pool", report={"test": samples(40, seed=5), "shifted": samples(30, seed=6)})
    before = compare(pool, task, ["best", "uniform"], run=tmp_path / "run")
    file = tmp_path / "run" / "methods" / "best" / "result.json"
    value = json.loads(file.read_text())
    del value["reports"]["test"]
    file.write_text(json.dumps(value))
    _, again = zoo(tmp_path / "other", report={"test": samples(40, seed=5), "shifted": samples(30, seed=6)})
    after = compare(pool, again, ["best", "uniform"], run=tmp_path / "run")
    assert list(after["best"].reports) == ["test", "shifted"]
    assert after["best"].reports["test"].value == before["best"].reports["test"].value


@pytest.mark.parametrize(("parameters", "threads"), [(SMALL - 1, 1), (SMALL, 3)])
def test_small_models_run_on_one_thread_and_the_callers_number_comes_back(parameters: int, threads: int) -> None:
    pool: Any = SimpleNamespace(specs={"weight": TensorSpec(torch.float32, (parameters,))})
    task: Any = SimpleNamespace(device=torch.device("cpu"))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threads_for(pool, task):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
