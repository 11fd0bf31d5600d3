"""Checkpoints of strangers, through every door by which one comes in."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attacks.kit import Threat, marker_in
from attacks.threats_archives import ARCHIVES
from attacks.threats_pickles import PICKLES
from attacks.threats_tensors import INDEXES, PLACES, TENSORS
from stockpot import Pool, Soup
from stockpot.adapters.models import load_weights
from stockpot.cli.recipes import _open as open_for_evaluate
from stockpot.errors import CheckpointError, StockpotError
from stockpot.pool import open_checkpoint
from stockpot.soup import rebuild

THREATS = [*PICKLES, *ARCHIVES, *TENSORS, *INDEXES, *PLACES]


def _soup_of(folder: Path, path: Path) -> Path:
    """A stranger's record that names the threat as an ingredient."""
    save_file({"w": torch.arange(4.0)}, folder / "good.safetensors")
    record = {
        "format": 1,
        "ingredients": [{"name": "a", "path": str(p), "digest": "0"} for p in (path, folder / "good.safetensors")],
        "opened_with": {"key": None, "rename": None, "mixed_dtypes": False},
        "dtype": None,
        "max_shard": 10**9,
        "free": False,
        "temperature": None,
        "about": {},
        "statistics": "averaged",
        "layout": {
            "granularity": "model",
            "groups": ["model"],
            "group_of": {"w": 0},
            "kept": {},
            "donor": 0,
            "tied": [],
        },
        "W": [[0.5], [0.5]],
    }
    (folder / "soup").mkdir()
    (folder / "soup" / "soup.json").write_text(json.dumps(record, default=str).encode("utf-8", "replace").decode())
    return folder / "soup"


def _by_soup(folder: Path, path: Path) -> Any:
    return Soup.load(_soup_of(folder, path))


def _by_rebuild(folder: Path, path: Path) -> Any:
    return rebuild(_soup_of(folder, path), folder / "again")


def _by_pool(folder: Path, path: Path) -> Any:
    save_file({"w": torch.arange(4.0)}, folder / "good.safetensors")
    return Pool.open(folder / "good.safetensors", path)


def _by_weights(folder: Path, path: Path) -> Any:
    return load_weights(torch.nn.Linear(2, 2), path)


def _by_evaluate(folder: Path, path: Path) -> Any:
    recipe: Any = SimpleNamespace(pool=SimpleNamespace(key=None, rename=None))
    return open_for_evaluate(path, recipe)


DOORS: tuple[Callable[[Path, Path], Any], ...] = (_by_pool, _by_soup, _by_rebuild, _by_weights, _by_evaluate)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_a_threat_gets_our_error_and_runs_nothing(threat: Threat, tmp_path: Path) -> None:
    path = threat.make(tmp_path)
    if threat.words is None:
        checkpoint = open_checkpoint(path)
        values = torch.cat([checkpoint.tensor(name).reshape(-1) for name in checkpoint.specs])
        assert sorted(values.tolist()) == [1.0, 2.0, 3.0, 4.0], "harmless: the right numbers"
        return
    with pytest.raises(CheckpointError, match=re.escape(threat.words)) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    message.encode("utf-8")
    assert all(char.isprintable() or char == "\n" for char in message)
    assert "weights_only" not in message, "never advice to open it without care"
    assert len(message) < 3000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_every_door_refuses_it(threat: Threat, tmp_path: Path) -> None:
    path = threat.make(tmp_path)
    for door in DOORS:
        room = tmp_path / f"room{door.__name__}"
        room.mkdir()
        try:
            door(room, path)
        except StockpotError as error:
            str(error).encode("utf-8")
        else:
            assert threat.words is None, door.__name__
        assert not (room / "again").exists()


@pytest.mark.parametrize("threat", [t for t in PICKLES if t.payload is not None], ids=str)
def test_the_payloads_are_live(threat: Threat, tmp_path: Path) -> None:
    """What the other tests show would mean nothing if the payloads were duds."""
    assert threat.payload is not None
    made = pickle.loads(threat.payload(tmp_path))
    if hasattr(made, "wait"):
        made.wait()
    assert marker_in(tmp_path).exists()
    marker_in(tmp_path).unlink()
