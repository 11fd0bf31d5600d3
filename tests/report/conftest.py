"""Records made once: a made-up one with every part, and one that a real comparison wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

import zoo
from stockpot import compare
from stockpot.report import write_report
from stockpot.task import Task

from .records import write_record


@pytest.fixture(scope="session")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up run with every part, and its report."""
    folder = write_record(tmp_path_factory.mktemp("report") / "complete")
    write_report(folder)
    return folder


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a real comparison on a toy zoo wrote, and its report."""
    base = tmp_path_factory.mktemp("report")
    pool = zoo.write(base / "zoo", zoo.fine_tunes(zoo.mlp, 4))
    task = Task(zoo.mlp(), zoo.samples(), zoo.samples(64, seed=7))
    methods = ("best", "uniform", "greedy", "ensemble", "learned+", "mehl+", "crossfit")
    compare(pool, task, methods, run=base / "run", steps=8, batch_size=16, each={"crossfit": {"steps": 8}})
    write_report(base / "run")
    return base / "run"
