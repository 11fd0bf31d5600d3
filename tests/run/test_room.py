"""Room is asked for before the work; without it, what was there before stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from stockpot import compare, cook
from stockpot.cli.app import app
from stockpot.errors import WriteError
from stockpot.soup import Soup
from stockpot.task import Task
from stockpot.zoo.plan import Plan, Trial
from stockpot.zoo.search import finetune
from torture.cases import prepare
from zoo import mlp, samples, zoo

Usage = namedtuple("Usage", "total used free")


def leave(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, nbytes))


def test_a_soup_without_room_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = zoo(tmp_path / "pool", 2)
    saved = Soup.uniform(pool).save(tmp_path / "soup")
    before = (saved / "model.safetensors").read_bytes()
    leave(monkeypatch, 1000)
    for act in (Soup.uniform(pool).save, Soup.uniform(pool).export):
        with pytest.raises(WriteError, match="of free space for the soup, found"):
            act(saved, overwrite=True)
    assert (saved / "model.safetensors").read_bytes() == before


def asked_for(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> int:
    """How much room a comparison asks for."""
    pool, task = zoo(folder / "pool", 4)
    asked: list[int] = []

    def note(path: Path, nbytes: int, what: str) -> None:
        asked.append(nbytes)
        raise WriteError("enough")

    with monkeypatch.context() as patch:
        patch.setattr("stockpot.files.require_space", note)
        with pytest.raises(WriteError, match="enough"):
            compare(pool, task, run=folder / "run", **options)
    return asked[0]


def test_the_forecast_of_a_run_counts_the_soup_and_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = asked_for(monkeypatch, tmp_path, methods=["hl+"], steps=10)
    longer = asked_for(monkeypatch, tmp_path, methods=["hl+"], steps=1000)
    more = asked_for(monkeypatch, tmp_path, methods=["best", "uniform", "greedy"])
    ingredient = (tmp_path / "pool" / "model_0.safetensors").stat().st_size
    assert ingredient / 2 < one < longer
    assert ingredient / 2 < more


def test_overwriting_waits_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = zoo(tmp_path / "pool", 4)
    cook(pool, task, "uniform", run=tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*") if path.is_file()}
    leave(monkeypatch, 1000)
    with pytest.raises(WriteError, match="of free space for the soup and its record"):
        cook(pool, Task(mlp(), samples()), "hl", seed=7, run=tmp_path / "out", overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*") if path.is_file()} == before
    monkeypatch.undo()
    cook(pool, Task(mlp(), samples()), "hl", steps=3, seed=7, run=tmp_path / "out", overwrite=True)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["seed"] == 7


def test_a_search_asks_for_what_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = tuple(Trial(lr=0.1, epochs=1, seed=n) for n in range(2))
    model = mlp()
    plan = Plan(trials, batch_size=48, probe=None)
    leave(monkeypatch, 10**6)
    with pytest.raises(WriteError, match="of free space for 2 checkpoints and the state of unfinished trials"):
        finetune(model, samples(48), None, tmp_path / "pool", plan)
    assert not list((tmp_path / "pool").glob("trial_*"))
    leave(monkeypatch, 10**9)
    assert len(finetune(model, samples(48), None, tmp_path / "pool", plan)) == 2


def test_the_command_line_says_it_and_exits_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    prepare(tmp_path, 0)
    leave(monkeypatch, 1000)
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["cook", str(tmp_path / "plain.yaml"), "--out", str(out)])
    assert result.exit_code == 1
    assert f"error: {out}: expected" in result.stderr
    assert "found 1000 B" in result.stderr
    assert [path.name for path in out.iterdir()] == [".lock"]


def test_a_read_only_place_is_said_in_our_words(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no mount namespaces here")
    prepare(tmp_path, 0)
    out = tmp_path / "out"
    out.mkdir()
    inside = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && echo mounted && shift && exec "$@"'
    command = [sys.executable, "-m", "stockpot", "cook", str(tmp_path / "plain.yaml"), "--out", str(out)]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside, "sh", out, *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if "mounted" not in done.stdout:
        pytest.skip(f"no read-only mounts here: {done.stderr[-200:]}")
    assert done.returncode == 1
    assert f"error: {out}/.lock: expected room and permission to write, found Read-only file system" in done.stderr
    assert "Fix: make it writable or choose another place" in done.stderr
