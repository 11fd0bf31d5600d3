"""How far it is from `cook` to equation 6, in frames and in files, and how often a pool is read on the way."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import stockpot
from stockpot import METHODS, compare, cook
from stockpot.engine import Engine, Live
from stockpot.pool import Checkpoint
from zoo import samples, zoo

ROOT = str(Path(stockpot.__file__).parent)


class FoundError(Exception):
    pass


def trace(folder: Path) -> tuple[list[str], set[str], set[str]]:
    """The functions on the stack at the first projection; files that they call directly; all files that ran."""
    pool, task = zoo(folder, 5)
    calls: list[tuple[FrameType, FrameType | None]] = []
    stack: list[FrameType] = []

    def watch(frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        calls.append((frame, frame.f_back))
        if (
            frame.f_code.co_qualname == "Directions.project"
            if hasattr(frame.f_code, "co_qualname")
            else (frame.f_code.co_name == "project")
        ):
            here: FrameType | None = frame
            while here is not None:
                if here.f_code.co_filename.startswith(ROOT):
                    stack.append(here)
                here = here.f_back
            raise FoundError

    sys.setprofile(watch)
    try:
        with pytest.raises(FoundError):
            cook(pool, task, "mehl", block_size=2, steps=2, batch_size=16)
    finally:
        sys.setprofile(None)
    on_stack = {id(frame) for frame in stack}
    near = {frame.f_code.co_filename for frame, back in calls if id(back) in on_stack or id(frame) in on_stack}
    return [frame.f_code.co_name for frame in reversed(stack)], near, {f.f_code.co_filename for f, _ in calls}


def test_equation_6_is_eight_frames_and_fifteen_files_from_cook(tmp_path: Path) -> None:
    """Files one opens to follow the call: those of the functions on the stack and of all that they call."""
    names, near, everything = trace(tmp_path)
    assert names[0] == "cook"
    assert names[-1] == "project"
    assert len(names) <= 8, names
    table = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text().split("From the call to equation 6")[1]
    rows = [line.split("|")[1:3] for line in table.split("\n\n")[1].splitlines()[2:]]
    assert [name for functions, _ in rows for name in re.findall(r"`(\w+)`", functions)] == names
    assert {f"{ROOT}/{file.strip(' `')}" for _, file in rows} <= near
    assert len(near) <= 15, sorted(near)
    assert len(everything) <= 39, sorted(everything)  # with every check, reader, event and bar; 49 before


def test_algorithm_1_is_short() -> None:
    assert len((Path(ROOT) / "soups" / "mehl.py").read_text().splitlines()) < 200


@pytest.mark.parametrize("report", [False, True])
def test_a_comparison_of_all_methods_reads_the_pool_at_most_twenty_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: bool
) -> None:
    """One pass reads every byte of every ingredient once; the mean of all is made once."""
    pool, task = zoo(tmp_path / "pool", 6, report=samples(60, seed=1) if report else None)
    reads: Counter[str] = Counter()
    means: list[int] = []
    tensor, mean = Checkpoint.tensor, Live.mean

    def counted(self: Checkpoint, name: str) -> Any:
        read = tensor(self, name)
        reads[name] += read.nbytes
        return read

    def averaged(self: Live, over: Any = None, *args: Any, **options: Any) -> Any:
        means.append(len(self.pool) if over is None else len(over))
        return mean(self, over, *args, **options)

    monkeypatch.setattr("stockpot.run.job.strangers_of", lambda *_: [])  # it reads the beginnings of some tensors
    monkeypatch.setattr(Checkpoint, "tensor", counted)
    monkeypatch.setattr(Live, "mean", averaged)
    engines: list[Engine] = []
    made = Engine.__init__

    def making(self: Engine, *args: Any, **options: Any) -> None:
        engines.append(self)
        made(self, *args, **options)

    monkeypatch.setattr(Engine, "__init__", making)
    short: dict[str, Any] = {"steps": 2, "batch_size": 16}
    compare(pool, task, METHODS, each={"crossfit": short}, run=tmp_path / "run", **short)
    assert len(engines) == 7
    passes = reads.total() / sum(spec.nbytes for spec in pool.specs.values()) / len(pool)
    assert 10 < passes <= 20, passes  # all of them go through Checkpoint.tensor
    assert means.count(len(pool)) == 1  # theta-bar
