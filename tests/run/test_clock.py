"""A clock that jumps, forwards or back, changes no result and stops nothing."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from stockpot.run import Identity, Job, RunDirectory, run_job
from stockpot.run.journal import read_events
from stockpot.soups.settings import settings_for
from torture.evidence import facts
from zoo import samples, zoo


def test_a_jumping_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = zoo(tmp_path / "pool", 4, report=samples(60, seed=5))
    settings = {name: settings_for(name, steps=5) for name in ("greedy", "mehl+", "crossfit")}

    def compared(path: Path) -> None:
        with RunDirectory.create(path, Identity("compare", "t")) as directory:
            run_job(directory, Job(pool, task, settings, save_every=0.0))

    compared(tmp_path / "steady")
    jumps = itertools.cycle((0.0, 4e9, 1.0, 1.7e9, -5.0))
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(next(jumps) * 1e9))
    compared(tmp_path / "jumping")
    assert facts(tmp_path / "jumping") == facts(tmp_path / "steady")
    moments = [event["time"] for event in read_events(tmp_path / "jumping" / "events.jsonl")]
    assert moments != sorted(moments)  # it did jump
    for file in (tmp_path / "jumping").glob("methods/*/result.json"):
        assert 0 <= json.loads(file.read_text())["seconds"] < 600
