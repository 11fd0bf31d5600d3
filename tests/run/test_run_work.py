"""A run decides everything before it looks at the report data, and continues as if never stopped."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stockpot import __version__, cook
from stockpot.errors import RunError
from stockpot.events import Event, Listener, ignore
from stockpot.pool import Pool, open_checkpoint
from stockpot.report import write_report
from stockpot.run import Identity, Job, Outcome, RunDirectory, run_job
from stockpot.run.records import read
from stockpot.run.soups import rebuild_soup
from stockpot.run.verdict import recommended
from stockpot.soups.settings import METHODS, Settings, settings_for
from stockpot.task import Task
from torture.evidence import facts
from zoo import fine_tunes, mlp, normed, same, samples, write, zoo

IDENTITY = Identity("compare", "toy")
FEW = ("best", "uniform", "greedy", "ensemble", "hl+", "crossfit")


def settings(*methods: str, **given: Any) -> dict[str, Settings]:
    return {name: settings_for(name, **{"steps": 6, **given}) for name in methods}


def cooked(
    path: Path, pool: Pool, task: Task, methods: dict[str, Settings], listen: Listener = ignore, **job: Any
) -> Outcome:
    with RunDirectory.create(path, IDENTITY) as directory:
        return run_job(directory, Job(pool, task, methods, **job), listen)


def toy(path: Path, count: int = 4, build: Callable[[], torch.nn.Module] = mlp) -> tuple[Pool, Task]:
    return zoo(path / "pool", count, build=build, report=samples(60, seed=5))


def files(path: Path) -> dict[str, bytes]:
    """What a run decided, without clocks and memory."""
    found = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if file.name in ("weights.safetensors", "model.safetensors", "statistics.safetensors"):
            found[name] = file.read_bytes()
        elif file.name == "result.json":
            value = json.loads(file.read_text())
            for unsteady in ("seconds", "peak_host", "peak_device"):
                del value[unsteady]
            found[name] = json.dumps(value).encode()
    return found


def test_the_record_is_complete(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    outcome = cooked(tmp_path / "run", pool, task, settings(*METHODS))
    run = tmp_path / "run"
    results = json.loads((run / "results.json").read_text())
    assert results["methods"] == list(METHODS)
    assert results["baseline"] == "best"
    assert results["recommended"] == outcome.recommended
    about = json.loads((run / "run.json").read_text())
    assert about["status"] == "done"
    ingredients = json.loads((run / "pool.json").read_text())
    assert [entry["name"] for entry in ingredients["ingredients"]] == list(pool.names)
    assert all(0 <= entry["fit"]["mean"] <= 1 for entry in ingredients["ingredients"])
    for name in METHODS:
        record = read(run / "methods" / name.replace("+", "-plus"))
        assert record is not None
        assert record.value["report"]["n"] == 60
        assert ("W" in record.tensors) == (name != "ensemble")
        assert len(record.tensors["report_values"]) == 60
    crossfit = read(run / "methods" / "crossfit")
    assert crossfit is not None
    assert {curve["fold"] for curve in crossfit.value["curves"]["held_out"]} == {0, 1, 2, 3}
    assert set(crossfit.value["guard"]["held_out"]) == {"learned", "best", "uniform", "greedy"}
    greedy = read(run / "methods" / "greedy")
    assert greedy is not None
    assert len(greedy.value["greedy"]) == 4
    assert outcome.soup is not None
    assert (outcome.soup / "model.safetensors").exists()


def test_a_held_out_loss_that_is_not_finite_is_a_gap_in_the_curve(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    outcome = cooked(
        tmp_path / "run", pool, task, settings("best", "crossfit", lr=1e30, steps=20, evaluations=10)
    )
    assert not outcome.failed
    record = read(tmp_path / "run" / "methods" / "crossfit")
    assert record is not None
    losses = [loss for curve in record.value["curves"]["held_out"] for loss in curve["loss"]]
    assert None in losses
    assert any(loss is not None for loss in losses)
    write_report(tmp_path / "run")  # draws it


def test_every_decision_comes_before_the_report_data(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    events: list[Event] = []
    cooked(tmp_path / "run", pool, task, settings(*FEW), events.append, growth=True)
    kinds = [event.kind for event in events if event.kind in ("cooked", "report")]
    assert kinds == sorted(kinds)  # all "cooked", then all "report"
    decided = len(FEW) + 3  # and uniform, greedy, crossfit of the first two ingredients
    assert kinds.count("cooked") == kinds.count("report") == decided


def test_finished_methods_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = toy(tmp_path)
    cooked(tmp_path / "run", pool, task, settings(*FEW))
    before = files(tmp_path / "run")

    def never(*args: object, **options: object) -> None:
        raise AssertionError("cooked or scored again")

    monkeypatch.setattr("stockpot.run.work.prepare", never)
    monkeypatch.setattr("stockpot.run.work.report_on", never)
    outcome = cooked(tmp_path / "run", pool, task, settings(*FEW))
    assert outcome.reused == FEW
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize("build", [mlp, normed])
@pytest.mark.parametrize("stop_at", [1, 17, 60, 1000])
def test_a_stopped_run_continues_bit_for_bit(
    tmp_path: Path, stop_at: int, build: Callable[[], torch.nn.Module]
) -> None:
    pool, task = toy(tmp_path, build=build)
    methods = settings(*FEW, block_size=None, warmup=0.2)
    cooked(tmp_path / "whole", pool, task, methods)
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
            cooked(tmp_path / "parts", pool, task, methods, stop, save_every=0.0)
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops == (stop_at != 1000)
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    assert not list((tmp_path / "parts").rglob("state.safetensors"))


def test_other_ingredients_or_data_are_refused(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    methods = settings("best")
    cooked(tmp_path / "run", pool, task, methods)
    changed = load_file(tmp_path / "pool" / "model_1.safetensors")
    changed["0.bias"] += 1
    save_file(changed, tmp_path / "pool" / "model_1.safetensors")
    again = Pool.open(tmp_path / "pool")
    with pytest.raises(RunError, match=r"found others[\s\S]*model_1: other content"):
        cooked(tmp_path / "run", again, task, methods)
    with pytest.raises(RunError, match=r"found other samples"):
        cooked(tmp_path / "run", pool, Task(mlp(), samples(seed=3)), methods)


def test_other_report_data_is_refused_also_when_only_some_methods_were_scored(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    cooked(tmp_path / "run", pool, task, settings("best"))
    other = Task(mlp(), samples(), report=samples(60, seed=6))
    with pytest.raises(
        RunError, match=r"the report data this run was started with, found other samples"
    ) as caught:
        cooked(tmp_path / "run", pool, other, settings("best", "uniform"))
    assert re.search(
        r"the content of the report data: fingerprint [0-9a-f]{12} -> [0-9a-f]{12}", str(caught.value)
    )


def test_other_defaults_are_refused_whether_a_method_is_finished_or_not(tmp_path: Path) -> None:
    """As after an update: the recipe is the same, what it means is not."""
    pool, task = toy(tmp_path)

    def stop(event: Event) -> None:
        if event.kind == "step":
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        cooked(tmp_path / "run", pool, task, settings("greedy", "hl+"), stop)
    before = files(tmp_path / "run")
    assert "methods/greedy/result.json" in before
    for changed in (
        {**settings("greedy"), **settings("hl+", lr=0.5)},
        {**settings("greedy", seed=1), **settings("hl+")},
    ):
        with pytest.raises(RunError) as caught:
            cooked(tmp_path / "run", pool, task, changed)
        text = str(caught.value)
        assert "expected the settings this run was started with, found other defaults of stockpot" in text
        assert re.search(
            r"What differs:\n    (hl\+\.lr: 0\.01 -> 0\.5|greedy\.seed: 0 -> 1)\n  Nothing", text
        )
        assert files(tmp_path / "run") == before
    run = tmp_path / "run" / "run.json"
    run.write_text(run.read_text().replace(f'"stockpot": "{__version__}"', '"stockpot": "0.0.1"'))
    with pytest.raises(RunError, match=rf"\(begun by stockpot 0\.0\.1, this is {re.escape(__version__)}\)"):
        cooked(tmp_path / "run", pool, task, settings("greedy", "hl+", lr=0.5))
    assert set(cooked(tmp_path / "run", pool, task, settings("greedy", "hl+")).reused) == {"greedy"}


@pytest.mark.parametrize("key", ["code", "settings", "fit_digest", "report_digest"])
@pytest.mark.parametrize("value", [5, [1], True])
def test_a_damaged_note_of_what_a_run_began_with_is_named(tmp_path: Path, key: str, value: object) -> None:
    pool, task = toy(tmp_path)
    cooked(tmp_path / "run", pool, task, settings("best"))
    run = tmp_path / "run" / "run.json"
    run.write_text(json.dumps({**json.loads(run.read_text()), key: value}))
    with pytest.raises(
        RunError, match=rf"run\.json: expected {key} as this run began with, found a value of type"
    ):
        cooked(tmp_path / "run", pool, task, settings("best"))


def test_what_finished_methods_were_done_with_counts_where_the_run_does_not_say(tmp_path: Path) -> None:
    """Runs that were begun before run.json had settings."""
    pool, task = toy(tmp_path)
    cooked(tmp_path / "run", pool, task, settings("hl+"))
    run = tmp_path / "run" / "run.json"
    about = json.loads(run.read_text())
    del about["settings"]
    run.write_text(json.dumps(about))
    with pytest.raises(RunError, match=r"hl\+\.lr: 0\.01 -> 0\.5"):
        cooked(tmp_path / "run", pool, task, settings("hl+", lr=0.5))
    assert cooked(tmp_path / "run", pool, task, settings("hl+")).reused == ("hl+",)
    result = tmp_path / "run" / "methods" / "hl-plus" / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "settings": 5}))
    with pytest.raises(RunError, match=r"result\.json: expected a file of a run record"):
        cooked(tmp_path / "run", pool, task, settings("hl+"))


def test_a_method_that_comes_along_later_is_no_other_setting(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    cooked(tmp_path / "run", pool, task, settings("uniform"))
    with contextlib.suppress(RunError):  # the report data was looked at
        cooked(tmp_path / "run", pool, task, settings("uniform", "hl+"))
    with pytest.raises(RunError, match=r"hl\+\.lr: 0\.01 -> 0\.5"):
        cooked(tmp_path / "run", pool, task, settings("uniform", "hl+", lr=0.5))


@pytest.mark.parametrize(
    "moment",
    [
        "stockpot.run.work.keep_scores",
        "stockpot.run.records.write",
        "stockpot.run.state.DiskStore.clear",
        "stockpot.run.records.write_report",
        "stockpot.soup.soup.Soup.save",
        "stockpot.run.directory.RunDirectory.write_json",
    ],
)
def test_a_run_stopped_between_two_files_ends_with_the_same_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    pool, task = toy(tmp_path)
    methods = settings("mehl+", "greedy", block_size=2)
    cooked(tmp_path / "whole", pool, task, methods)
    for turn in range(1, 9):
        turns = iter(range(1, 10**6))
        original = _found(moment)

        def stop(*args: Any, **options: Any) -> Any:
            if next(turns) == turn:  # noqa: B023  (called within this turn)
                raise KeyboardInterrupt
            return original(*args, **options)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(moment, stop)
            with contextlib.suppress(KeyboardInterrupt):
                cooked(tmp_path / "parts", pool, task, methods, save_every=0.0)
    cooked(tmp_path / "parts", pool, task, methods)
    assert facts(tmp_path / "parts") == facts(tmp_path / "whole")


def _found(path: str) -> Any:
    """The function that a dotted path names; the path leads through modules and then maybe a class."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(_found(module), name)


def test_a_method_that_fails_does_not_cost_the_others(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    methods = {**settings("best"), **settings("mehl", block_size=9), **settings("uniform")}
    outcome = cooked(tmp_path / "run", pool, task, methods)
    assert outcome.methods == ("best", "uniform")
    assert "block_size" in outcome.failed["mehl"]
    assert list(json.loads((tmp_path / "run" / "results.json").read_text())["failed"]) == ["mehl"]


def test_the_recommendation_does_not_look_at_the_report_data(tmp_path: Path) -> None:
    pool, task = toy(tmp_path)
    cooked(tmp_path / "run", pool, task, settings("best", "uniform", "hl+", "crossfit"))
    found = {
        name: read(tmp_path / "run" / "methods" / name.replace("+", "-plus"))
        for name in ("best", "uniform", "hl+", "crossfit")
    }
    known = {name: record for name, record in found.items() if record is not None}
    choice = recommended(known)
    assert choice == "crossfit"  # the only one with held-out data
    for record in known.values():
        object.__setattr__(record, "value", {**record.value, "report": None})
    assert recommended(known) == choice


@pytest.mark.parametrize("build", [mlp, normed])
def test_a_run_gives_what_the_library_gives(tmp_path: Path, build: Callable[[], torch.nn.Module]) -> None:
    pool, task = toy(tmp_path, build=build)
    outcome = cooked(tmp_path / "run", pool, task, settings("hl+"), wanted="hl+")
    direct = cook(pool, task, "hl+", steps=6)
    assert outcome.soup is not None
    assert direct.soup is not None
    assert direct.report is not None
    assert same(load_file(outcome.soup / "model.safetensors"), direct.soup.state_dict())
    opened = open_checkpoint(outcome.soup)  # also when statistics lie beside the weights
    assert same({name: opened.tensor(name) for name in opened.specs}, direct.soup.state_dict())
    record = read(tmp_path / "run" / "methods" / "hl-plus")
    assert record is not None
    assert torch.equal(record.tensors["report_values"], direct.report.values)
    assert record.value["report"]["loss"] == direct.report.loss


def test_any_soup_of_a_run_can_be_rebuilt(tmp_path: Path) -> None:
    pool, task = toy(tmp_path, build=normed)
    outcome = cooked(tmp_path / "run", pool, task, settings("best", "hl+", "crossfit"))
    assert outcome.soup is not None
    before = (outcome.soup / "model.safetensors").read_bytes()
    assert rebuild_soup(tmp_path / "run") == (outcome.soup, True)
    path, _ = rebuild_soup(tmp_path / "run", out=tmp_path / "again")
    assert (path / "model.safetensors").read_bytes() == before
    rebuild_soup(tmp_path / "run", method="hl+", out=tmp_path / "hl")
    assert (tmp_path / "hl" / "model.safetensors").read_bytes() != before
    with pytest.raises(RunError, match=r"expected one that made a soup: best, crossfit, hl\+, found none"):
        rebuild_soup(tmp_path / "run", method="mehl")


def test_identical_ingredients_and_no_report_data_still_make_a_record(tmp_path: Path) -> None:
    states = fine_tunes(mlp, 2)
    pool = write(tmp_path / "pool", [states[0], states[1], states[1]])
    outcome = cooked(tmp_path / "run", pool, Task(mlp(), samples()), settings("best", "crossfit"))
    assert "no report data was given" in outcome.verdict
    pairs = json.loads((tmp_path / "run" / "pool.json").read_text())["distances"]
    assert pairs[1][2] == 0.0 != pairs[0][1]
