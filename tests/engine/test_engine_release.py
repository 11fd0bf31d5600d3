"""Memory holds one block of models: the old one is gone before the next is read."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from stockpot.engine.directions import Directions
from stockpot.engine.loader import Loader
from stockpot.soups import cook
from zoo import zoo


@pytest.mark.parametrize("method", ["mehl", "crossfit"])
def test_the_old_block_is_freed_before_the_next_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    pool, task = zoo(tmp_path, 6)
    loaded: list[weakref.ref[Directions]] = []
    alive: list[int] = []
    load = Loader.load

    def watched(self: Loader, *args: Any, **options: Any) -> Directions:
        gc.collect()
        alive.append(sum(ref() is not None for ref in loaded))
        directions = load(self, *args, **options)
        loaded.append(weakref.ref(directions))
        return directions

    monkeypatch.setattr(Loader, "load", watched)
    cook(pool, task, method, block_size=2, steps=3)
    assert alive == [0, 0, 0]
