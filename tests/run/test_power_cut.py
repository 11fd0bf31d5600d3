"""What a power cut takes is what was not flushed: a rename comes after its data, a commit after what it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stockpot import cook, files
from stockpot.run.directory import RecipeFacts
from stockpot.zoo.plan import Plan, Trial
from stockpot.zoo.search import finetune
from zoo import normed, samples, zoo

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks /proc what a handle is of")

Call = tuple[str, str]  # "flush" or "rename", and the path (of a rename: the new one)


class Recorder:
    """Notes flushes and renames, and refuses a rename of what has not been flushed as it is."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._flushed: dict[str, tuple[int, int]] = {}  # path -> size and time when it was flushed

    @contextmanager
    def watching(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def flush(handle: int) -> None:
            fsync(handle)
            path = os.readlink(f"/proc/self/fd/{handle}")  # noqa: PTH115
            self._flushed[path] = _stamp(path)
            self.calls.append(("flush", path))

        def moving(move: Any) -> Any:
            def moved(source: Any, target: Any, **options: Any) -> None:
                self._check(_whole(source, options.get("src_dir_fd")))
                path = _whole(target, options.get("dst_dir_fd"))
                move(source, target, **options)
                self.calls.append(("rename", path))

            return moved

        with patch.context() as one:
            one.setattr(os, "fsync", flush)
            one.setattr(os, "rename", moving(rename))
            one.setattr(os, "replace", moving(replace))
            yield

    def _check(self, source: str) -> None:
        if Path(source).name.startswith("shard-"):
            return  # inside a directory that is flushed whole before its own rename
        inside = [str(path) for path in Path(source).rglob("*")] if Path(source).is_dir() else []
        for path in (source, *inside):
            assert path in self._flushed, f"{path} was not flushed before the rename"
            if Path(path).is_file():
                assert self._flushed[path] == _stamp(path), f"{path} was written to after it was flushed"

    def settled(self) -> list[str]:
        """Renamed paths in order; each had its directory flushed before the next rename outside that directory."""
        order = []
        for number, (kind, path) in enumerate(self.calls):
            if kind != "rename" or ".writing" in path:
                continue
            later = self.calls[number + 1 :]
            until = next((i for i, call in enumerate(later) if call[0] == "rename"), len(later))
            assert ("flush", str(Path(path).parent)) in later[:until], f"{path}: its directory was not flushed"
            order.append(path)
        return order


def _whole(path: Any, folder: int | None) -> str:
    """A path that may be relative to an open directory."""
    return str(path) if folder is None else str(Path(f"/proc/self/fd/{folder}").readlink() / path)


def _stamp(path: str) -> tuple[int, int]:
    status = Path(path).stat()
    return status.st_size, status.st_mtime_ns


def test_a_run_is_flushed_before_it_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = zoo(tmp_path / "pool", 3, build=normed, report=samples(60, seed=5))
    monkeypatch.setattr("stockpot.run.state.INTERVAL", 0.0)
    recorder, run = Recorder(), tmp_path / "run"
    shards = RecipeFacts(kind="cook", max_shard=200)
    with recorder.watching(monkeypatch):
        cook(pool, task, "mehl+", steps=3, block_size=2, run=run, recipe=shards)
    order = [str(Path(path).relative_to(run)) for path in recorder.settled()]
    method = "methods/mehl-plus"
    first = order.index(f"{method}/result.json")
    for needed in ("weights.safetensors", "soup.json", "statistics.safetensors", "state.safetensors"):
        assert order.index(f"{method}/{needed}") < first
    assert order[-3:] == [f"{method}/soup", "results.json", "run.json"]
    assert order[0] == "run.json"


def test_a_trial_is_flushed_before_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plan = Plan((Trial(lr=0.1, epochs=2), Trial(lr=0.2, epochs=2)), batch_size=16)
    recorder = Recorder()
    with recorder.watching(monkeypatch):
        finetune(normed(), samples(48), samples(48, seed=1), tmp_path / "pool", plan, save_every=0.0)
    order = [str(Path(path).relative_to(tmp_path / "pool")) for path in recorder.settled()]
    assert order[:2] == ["search/plan.json", "search/start.safetensors"]
    for name in ("trial_000", "trial_001"):
        assert order.index(f"search/{name}.safetensors") < order.index(f"{name}.safetensors")
        assert order.index(f"{name}.safetensors") < order.index(f"{name}.json")


def test_new_directories_are_flushed_into_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    with recorder.watching(monkeypatch):
        files.make_directory(tmp_path / "a" / "b")
    assert recorder.calls == [("flush", str(tmp_path)), ("flush", str(tmp_path / "a"))]


def test_the_recorder_can_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    (tmp_path / "a").write_text("x")
    with recorder.watching(monkeypatch):
        with pytest.raises(AssertionError, match="was not flushed before"):
            (tmp_path / "a").rename(tmp_path / "b")
        handle = os.open(tmp_path / "a", os.O_RDWR)
        os.fsync(handle)
        os.write(handle, b"more")
        os.close(handle)
        with pytest.raises(AssertionError, match="was written to after"):
            (tmp_path / "a").rename(tmp_path / "b")
        handle = os.open(tmp_path / "a", os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        (tmp_path / "a").rename(tmp_path / "b")
        with pytest.raises(AssertionError, match="its directory was not flushed"):
            recorder.settled()
