"""Room is asked for before the work; without it, what was there before stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from stockpot.cli.app import app
from stockpot.disk import require_space
from stockpot.errors import WriteError
from stockpot.zoo import Plan, Trial, finetune
from stockpot.recipe import load_recipe
from stockpot.run import Job
from stockpot.run.recipe_job import run_cook
from stockpot.run.room import forecast
from stockpot.soup import Soup
from stockpot.soups.settings import settings_for
from torture.cases import prepare
from zoo import mlp, samples, zoo

Usage = namedtuple("Usage", "total used free")


def leave(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, nbytes))


def test_too_little_room_is_said_in_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 40 * 10**6)
    require_space(tmp_path / "not" / "yet" / "there", 10**6, "a soup")
    expected = r"expected 3\.0 GB of free space for a soup, found 40\.0 MB\.\n  Fix: free some space"
    with pytest.raises(WriteError, match=expected):
        require_space(tmp_path / "not" / "yet" / "there", 3 * 10**9, "a soup")


def test_a_soup_without_room_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = zoo(tmp_path / "pool", 2)
    saved = Soup.uniform(pool).save(tmp_path / "soup")
    before = (saved / "model.safetensors").read_bytes()
    leave(monkeypatch, 1000)
    for act in (Soup.uniform(pool).save, Soup.uniform(pool).export):
        with pytest.raises(WriteError, match="of free space for the soup, found"):
            act(saved, overwrite=True)
    assert (saved / "model.safetensors").read_bytes() == before


def test_the_forecast_of_a_run_counts_the_soup_and_every_method(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path / "pool", 4)
    one = forecast(Job(pool, task, {"hl+": settings_for("hl+", steps=10)}))
    longer = forecast(Job(pool, task, {"hl+": settings_for("hl+", steps=1000)}))
    more = forecast(Job(pool, task, {name: settings_for(name) for name in ("best", "uniform", "greedy")}))
    grown = forecast(
        Job(pool, task, {name: settings_for(name) for name in ("best", "uniform", "greedy")}, growth=True)
    )
    assert pool.nbytes < one < longer
    assert pool.nbytes < more < grown


def test_overwriting_waits_until_pool_data_settings_and_room_are_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, 0)
    settings = ["method.name=uniform", "output.dir=out"]
    run_cook(load_recipe(tmp_path / "plain.yaml", settings), title="first")
    other = load_recipe(tmp_path / "plain.yaml", [*settings, "output.seed=7"])
    typo = load_recipe(tmp_path / "plain.yaml", [*settings, "output.seed=7", "pool.path=nowhere"])
    crossfit = ["method.name=crossfit", "output.dir=out"]
    folds = load_recipe(tmp_path / "plain.yaml", [*crossfit, "method.folds=1000"])
    blocks = load_recipe(tmp_path / "plain.yaml", [*crossfit, "method.block_size=1000"])
    leave(monkeypatch, 1000)
    for recipe, found in (
        (other, "of free space for the soup and its record"),
        (typo, "nowhere"),
        (folds, "at least 2000 samples for 1000 folds"),
        (blocks, "setting block_size: expected at most K"),
    ):
        with pytest.raises(Exception, match=found):
            run_cook(recipe, title="second", overwrite=True)
        about = json.loads((tmp_path / "out" / "run.json").read_text())
        assert (about["title"], about["status"]) == ("first", "done")
        assert (tmp_path / "out" / "methods" / "uniform" / "soup" / "model.safetensors").is_file()
    monkeypatch.undo()
    run_cook(other, title="second", overwrite=True)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["title"] == "second"


def test_a_search_asks_for_what_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = tuple(Trial(lr=0.1, epochs=1, seed=n) for n in range(2))
    model = mlp()
    plan = Plan(trials, batch_size=48, probe=None)
    leave(monkeypatch, 10**6)
    with pytest.raises(
        WriteError, match="of free space for 2 checkpoints and the state of unfinished trials"
    ):
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
    assert "found 1.0 kB" in result.stderr
    assert [path.name for path in out.iterdir()] == [".lock"]


def test_a_read_only_place_is_said_in_our_words(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no mount namespaces here")
    prepare(tmp_path, 0)
    out = tmp_path / "out"
    out.mkdir()
    inside = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && echo mounted && shift && exec "$@"'
    command = [sys.executable, "-m", "stockpot.cli", "cook", str(tmp_path / "plain.yaml"), "--out", str(out)]
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
    assert (
        f"error: {out}/.lock: expected room and permission to write, found Read-only file system"
        in done.stderr
    )
    assert "Fix: make it writable or choose another place" in done.stderr
