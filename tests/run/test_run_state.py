"""The state of an unfinished method on disk: what goes in comes out, with what it took."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from stockpot.errors import LinkError, RunError
from stockpot.run.state import STATE, DiskStore


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "method", tmp_path)
    assert store.load() is None
    assert store.earlier == (0.0, 0, 0)
    tensors = {"0.alpha": torch.arange(6.0).view(2, 3).t(), "history": torch.ones(2, dtype=torch.float64)}
    store.save(tensors, {"blocks": [[0, 1]], "starts": None})
    loaded = DiskStore(tmp_path / "method", tmp_path).load()
    assert loaded is not None
    found, values = loaded
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert found["history"].dtype == torch.float64
    assert values == {"blocks": [[0, 1]], "starts": None}
    assert [file.name for file in (tmp_path / "method").iterdir()] == [STATE]


def test_a_newer_state_replaces_the_older(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, tmp_path)
    for step in range(3):
        store.save({"x": torch.full((1,), float(step))}, {"step": step})
    loaded = store.load()
    assert loaded is not None
    assert (loaded[0]["x"].item(), loaded[1]["step"]) == (2.0, 2)


def fold_at(step: int, blocks: list[list[int]], *folds: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    history = torch.tensor([[0, 0, fold, j, 0.5, 0.1] for fold in folds for j in range(step)], dtype=torch.float64)
    tensors = {f"{fold}.alpha": torch.full((1,), float(step)) for fold in folds}
    return {**tensors, "history": history}, {
        "blocks": blocks,
        "options": step,
        "folds": {str(f): {"t": 0, "j": step, "losses": [], "decided": 0} for f in folds},
    }


def test_of_each_fold_counts_where_it_got_furthest_in_the_blocks_of_now(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, tmp_path)
    store.save(*fold_at(5, [[0, 1]], 0, 1))
    store.save(*fold_at(7, [[0, 1]], 1), part=1)
    tensors, values = store.load() or ({}, {})
    assert [values["folds"][fold]["j"] for fold in "01"] == [5, 7]
    assert [tensors[f"{fold}.alpha"].item() for fold in "01"] == [5, 7]
    assert len(tensors["history"]) == 12
    assert values["options"] == 7  # how memory is used now
    # Memory was short, so the block was cut and both folds began again.
    store.save(*fold_at(2, [[0], [1]], 1), part=1)
    tensors, values = store.load() or ({}, {})
    assert values["blocks"] == [[0], [1]]
    assert {fold: kept["j"] for fold, kept in values["folds"].items()} == {"1": 2}  # fold 0 had not got anywhere
    assert [path.name for path in tmp_path.iterdir()] == [STATE]


def test_values_of_any_length_leave_the_header_small(tmp_path: Path) -> None:
    """Before, all values were in the header, which readers limit to 100 MB and parse before anything else."""
    store = DiskStore(tmp_path, tmp_path)
    store.save({"x": torch.ones(3)}, {"history": [{"kind": "step", "loss": 0.5}] * 20_000})
    content = (tmp_path / STATE).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length < 400 < 500_000 < len(content)
    assert "__metadata__" not in json.loads(content[8 : 8 + length])
    loaded = store.load()
    assert loaded is not None
    assert len(loaded[1]["history"]) == 20_000


def test_seconds_and_peaks_go_on_where_an_earlier_process_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("stockpot.run.state.time.perf_counter", lambda: clock[0])
    for peaks, seconds, found in (
        ((500, 70), 7.0, (7.0, 500, 70)),
        ((400, 90), 2.0, (9.0, 500, 90)),
        ((1, 1), 1.0, (10.0, 500, 90)),
    ):
        store = DiskStore(tmp_path, tmp_path)
        store.load()
        store.peaks = lambda peaks=peaks: peaks  # type: ignore[misc]
        clock[0] += seconds
        store.save({}, {})
        again = DiskStore(tmp_path, tmp_path)
        again.load()
        assert again.earlier == found


def test_a_finished_method_leaves_no_state(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "a", tmp_path)
    store.clear()
    store.save({}, {})
    store.clear()
    assert store.load() is None
    store.clear()


def test_a_damaged_state_is_refused_with_what_to_do(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, tmp_path)
    store.save({"x": torch.ones(3)}, {})
    content = (tmp_path / STATE).read_bytes()
    (tmp_path / STATE).write_bytes(content[:-1])
    with pytest.raises(RunError, match="the method then starts from its beginning"):
        store.load()


def test_a_state_is_neither_read_nor_written_nor_removed_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    DiskStore(outside, tmp_path).save({"x": torch.ones(3)}, {})
    before = (outside / STATE).read_bytes()
    root = tmp_path / "run"
    (root / "own").mkdir(parents=True)
    (root / "own" / STATE).symlink_to(outside / STATE)
    (root / "linked").symlink_to(outside)
    for folder in (root / "own", root / "linked"):
        with pytest.raises(LinkError):
            DiskStore(folder, root).load()
    with pytest.raises(LinkError):
        DiskStore(root / "linked", root).save({}, {})
    with pytest.raises(LinkError):
        DiskStore(root / "linked", root).clear()
    DiskStore(root / "own", root).save({}, {})  # replaces the link, not what it leads to
    assert (outside / STATE).read_bytes() == before
    (root / "own" / STATE).unlink()
    os.mkfifo(root / "own" / STATE)
    with pytest.raises(LinkError, match="neither a regular file nor a directory"):
        DiskStore(root / "own", root).load()
