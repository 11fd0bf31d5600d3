"""A directory is on the disk, whole, before it gets its name, and its name before the old content goes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from stockpot import atomic


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed, renamed and removed, in order, by name."""
    found: list[str] = []
    real_sync, real_rename, real_remove = os.fsync, Path.rename, shutil.rmtree

    def fsync(handle: int) -> None:
        found.append(f"flush {Path(f'/proc/self/fd/{handle}').readlink().name}")
        real_sync(handle)

    def rename(self: Path, target: Any) -> Path:
        found.append(f"rename {self.name} {Path(target).name}")
        return real_rename(self, target)

    def rmtree(path: Any, **how: Any) -> None:
        if Path(path).exists():
            found.append(f"remove {Path(path).name}")
        real_remove(path, **how)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads names of open files from /proc")
def test_a_directory_is_flushed_before_it_is_named_and_the_old_one_stays_until_then(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)  # the way without one step
    home = tmp_path / "home"
    (home / "soup").mkdir(parents=True)
    (home / "soup" / "old").touch()
    with atomic.directory(home / "soup", overwrite=True) as folder:
        (folder / "weights").write_text("w")
    assert told == [
        "flush weights",
        "flush .soup.writing",
        "rename soup .soup.replaced",
        "rename .soup.writing soup",
        "flush home",
        "remove .soup.replaced",
        "flush home",
    ]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux exchanges two names in one step")
def test_an_exchange_is_flushed_before_the_old_content_goes(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "soup").mkdir(parents=True)
    (home / "soup" / "old").touch()
    monkeypatch.chdir(home)  # a relative name is one in the current folder
    with atomic.directory(Path("soup"), overwrite=True) as folder:
        (folder / "weights").write_text("w")
    assert [line for line in told if line != "flush weights"] == [
        "flush .soup.writing",
        "flush home",
        "remove .soup.writing",
        "flush home",
    ]
    assert [path.name for path in (home / "soup").iterdir()] == ["weights"]
