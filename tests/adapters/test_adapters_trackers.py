"""Trackers, with the real libraries: what a run tells them, and what happens when they fail."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stockpot import Pool, Task, compare, cook
from stockpot.adapters.trackers import TRACKERS, tracking
from stockpot.errors import RunError, TaskError
from stockpot.events import Event, ignore
from stockpot.recipe import load_recipe
from stockpot.recipe.build import build_pool, build_task, cook_arguments

X = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
TAGS = {"hl-plus/fold0/block0/fit_loss", "hl-plus/fold0/block0/lr", "hl-plus/test", "uniform/test"}


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in [one for one in os.environ if one.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it reads the environment once in a process


def compared(track: Any, run: Path | None = None) -> list[float]:
    """The scores on the test data of `hl+`, learned in six steps, and `uniform`."""
    torch.manual_seed(0)
    pool = Pool.open([nn.Linear(3, 2).state_dict() for _ in range(2)])
    task = Task(nn.Linear(3, 2), (X[:40], Y[:40]), {"test": (X[40:], Y[40:])})
    found = compare(pool, task, ["uniform", "hl+"], run=run, track=track, steps=6)
    return [found[name].score.value for name in ("hl+", "uniform")]


def of_tensorboard(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [one.value for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_is_in_the_run_directory(tmp_path: Path) -> None:
    scores = compared("tensorboard", tmp_path / "run")
    found = {tag.replace("+", "-plus"): values for tag, values in of_tensorboard(tmp_path / "run/tensorboard").items()}
    assert found.keys() == TAGS
    assert len(found["hl-plus/fold0/block0/fit_loss"]) == 6
    assert [found["hl-plus/test"][0], found["uniform/test"][0]] == pytest.approx(scores)


def test_mlflow_gets_numbers_settings_and_the_end() -> None:
    from mlflow import MlflowClient

    scores = compared("mlflow")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("stockpot")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics.keys() == TAGS
    losses = client.get_metric_history(run.info.run_id, "hl-plus/fold0/block0/fit_loss")
    assert [one.step for one in losses] == list(range(6))
    assert [run.data.metrics[name] for name in ("hl-plus/test", "uniform/test")] == pytest.approx(scores)
    assert json.loads(run.data.params["hl-plus"])["steps"] == 6


def of_wandb(folder: Path) -> dict[str, list[float]]:
    """What an offline run wrote: records of protobuf in a log of LevelDB's form."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, found = file.read_bytes(), dict[str, list[float]]()
    at, whole = 7, b""  # behind the file's own header
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # no header of a piece fits in the rest of a block
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                found.setdefault(name.replace("+", "-plus"), []).append(json.loads(item.value_json))
    return found


def test_wandb_gets_numbers_although_steps_begin_anew_in_each_group(tmp_path: Path) -> None:
    scores = compared("wandb")
    until = time.monotonic() + 20  # a process of its own writes the file, and may still do so
    while not (found := of_wandb(tmp_path)).keys() >= TAGS and time.monotonic() < until:
        time.sleep(0.05)
    assert {name for name in found if not name.startswith("_") and not name.endswith("/step")} == TAGS
    assert found["hl-plus/fold0/block0/step"] == list(range(6))
    assert len(found["hl-plus/fold0/block0/fit_loss"]) == 6
    assert [found["hl-plus/test"][0], found["uniform/test"][0]] == pytest.approx(scores)


RECIPE = """
pool: {{path: 'pool_*.safetensors'}}
model: {{python: "own:model"}}
data: {{python: "own:data"}}
method: {{name: uniform}}
output: {{dir: run, track: {track}}}
"""
OWN = """
import torch

def model():
    return torch.nn.Linear(3, 2)

def data(which):
    return torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
"""
PLACES = {"tensorboard": "run/tensorboard/events.*", "mlflow": "mlruns/*/*/metrics", "wandb": "wandb/offline-run-*"}


@pytest.mark.parametrize("track", TRACKERS)
def test_a_recipe_names_its_tracker(track: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(OWN)
    for number in range(2):
        save_file(nn.Linear(3, 2).state_dict(), tmp_path / f"pool_{number}.safetensors")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(track=track))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    cook(build_pool(recipe), build_task(recipe), **cook_arguments(recipe))
    assert list(tmp_path.glob(PLACES[track])), list(tmp_path.rglob("*"))


def test_one_soup_is_tracked_too() -> None:
    from mlflow import MlflowClient

    pool = Pool.open([nn.Linear(3, 2).state_dict() for _ in range(2)])
    cook(pool, Task(nn.Linear(3, 2), (X, Y)), "hl+", steps=3, track="mlflow")
    (run,) = MlflowClient().search_runs([MlflowClient().get_experiment_by_name("stockpot").experiment_id])
    assert "hl-plus/fold0/block0/fit_loss" in run.data.metrics


def test_a_run_that_is_stopped_is_not_finished() -> None:
    from mlflow import MlflowClient

    def stopped() -> None:
        with tracking("mlflow", None, "stopped", {}, ignore) as listen:
            listen(Event("report", {"method": "hl", "set": "report", "value": 0.5}))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    (run,) = MlflowClient().search_runs([MlflowClient().get_experiment_by_name("stockpot").experiment_id])
    assert (run.info.status, run.info.run_name) == ("KILLED", "stopped")
    assert run.data.metrics == {"hl/report": 0.5}


def test_a_tracker_that_fails_later_costs_nothing_but_its_numbers(tmp_path: Path) -> None:
    heard: list[Event] = []
    with tracking("mlflow", None, "lost", {}, heard.append) as listen:
        for experiment in (tmp_path / "mlruns").glob("[0-9]*"):
            experiment.rename(tmp_path / f"gone-{experiment.name}")
        report = Event("report", {"method": "hl", "set": "report", "value": 0.5})
        for _ in range(600):
            listen(report)
    (told,) = (event.data["text"] for event in heard if event.kind == "phase")
    assert told.startswith("mlflow failed, and nothing more is written there: MlflowException: ")
    assert heard.count(report) == 600


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "unknown": (lambda: compared("comet"), RunError, "expected one of tensorboard, mlflow, wandb, found 'comet'"),
    "no directory": (lambda: compared("tensorboard"), RunError, 'expected a run directory, found none.*give run="run"'),
    "not writable": (
        lambda: (os.environ.pop("MLFLOW_ALLOW_FILE_STORE"), compared("mlflow")),
        TaskError,
        "tracker mlflow: expected one that can be written to, found MlflowException: .*leave track out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tracker_that_cannot_be_used_is_refused_at_the_start(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stockpot.pool.Pool.facts", lambda *_: pytest.fail("work began"))
    call, kind, text = REFUSED[case]
    with pytest.raises(kind, match=f"(?s){text}"):
        call()
