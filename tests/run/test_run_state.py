"""The state of an unfinished method on disk: what goes in comes out, with the time it took."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stockpot.errors import RunError
from stockpot.run.state import INTERVAL, STATE, DiskStore


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "method")
    assert store.load() is None
    assert store.earlier == 0.0
    tensors = {
        "visit.0.0": torch.arange(6.0).view(2, 3).t(),
        "partial.raw": torch.ones(2, dtype=torch.float64),
    }
    store.save(tensors, {"blocks": [[0, 1]], "partial": None})
    loaded = DiskStore(tmp_path / "method").load()
    assert loaded is not None
    found, values = loaded
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert found["partial.raw"].dtype == torch.float64
    assert values == {"blocks": [[0, 1]], "partial": None}
    assert [file.name for file in (tmp_path / "method").iterdir()] == [STATE]


def test_a_newer_state_replaces_the_older(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for step in range(3):
        store.save({"x": torch.full((1,), float(step))}, {"step": step})
    loaded = store.load()
    assert loaded is not None
    assert (loaded[0]["x"].item(), loaded[1]["step"]) == (2.0, 2)


def test_seconds_go_on_where_an_earlier_process_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("stockpot.run.state.time.perf_counter", lambda: clock[0])
    first = DiskStore(tmp_path)
    clock[0] += 7.0
    assert first.seconds == 7.0
    first.save({}, {})
    second = DiskStore(tmp_path)
    second.load()
    assert second.earlier == 7.0
    clock[0] += 2.0
    assert second.seconds == 9.0


def test_a_finished_method_leaves_no_state(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.save({}, {})
    store.clear()
    assert store.load() is None
    store.clear()


def test_the_interval_is_the_callers_or_ours(tmp_path: Path) -> None:
    assert DiskStore(tmp_path).interval == INTERVAL
    assert DiskStore(tmp_path, 0.5).interval == 0.5


def test_a_damaged_state_is_refused_with_what_to_do(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.save({"x": torch.ones(3)}, {})
    content = (tmp_path / STATE).read_bytes()
    (tmp_path / STATE).write_bytes(content[:-1])
    with pytest.raises(RunError, match="the method then starts from its beginning"):
        store.load()
