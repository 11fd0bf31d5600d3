"""Soups and runs of strangers: loaded, rebuilt, reported on, continued."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attacks.kit import Threat
from attacks.threats_records import SOUPS, pool, soup
from stockpot import Soup
from stockpot.errors import RunError, StockpotError
from stockpot.pool import Pool
from stockpot.report import write_report
from stockpot.run.ingredients import trial_settings
from stockpot.run.soups import rebuild_soup
from stockpot.run.state import DiskStore
from stockpot.soup import rebuild


@pytest.mark.timeout(60)
@pytest.mark.parametrize("threat", SOUPS, ids=str)
def test_a_soup_of_a_stranger_is_refused(threat: Threat, tmp_path: Path) -> None:
    assert threat.words is not None
    path = threat.make(tmp_path)
    with pytest.raises(StockpotError, match=re.escape(threat.words)):
        rebuild(path, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_the_honest_soup_is_not_refused(tmp_path: Path) -> None:
    path = soup(tmp_path)
    rebuild(path, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        path / "model.safetensors"
    ).read_bytes()


def test_a_link_of_an_ingredient_does_not_carry_my_files_into_my_soup(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("my key")
    for k in range(2):
        folder = tmp_path / "pool" / f"m{k}"
        folder.mkdir(parents=True)
        save_file({"w": torch.arange(4.0) + k}, folder / "model.safetensors")
        (folder / "config.json").symlink_to(tmp_path / "secret")
        (folder / "vocab.txt").write_text("a word")
    saved = Soup.uniform(Pool.open(tmp_path / "pool")).save(tmp_path / "soup")
    assert not (saved / "config.json").exists()
    assert (saved / "vocab.txt").read_text() == "a word", "its own files come along"


# Runs ------------------------------------------------------------------------------------------------------


def _run(folder: Path) -> Path:
    """The least that is a finished run of one soup."""
    run = folder / "run"
    method = run / "methods" / "uniform"
    method.mkdir(parents=True)
    made = soup(folder / "cooked")
    for name in ("soup.json", "statistics.safetensors"):
        (method / name).write_bytes((made / name).read_bytes())
    save_file({"W": torch.full((2, 2), 0.5, dtype=torch.float64)}, method / "weights.safetensors")
    about = {"format": 1, "kind": "cook", "status": "done", "title": "t", "seed": 0}
    score = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 10, "loss": 1.0}
    result = {"method": "uniform", "settings": {}, "seconds": 1.0, "fit": score, "groups": ["w", "head"]}
    found = {
        "ingredients": [{"name": f"m{k}", "path": "p", "format": "safetensors", "bytes": 1} for k in range(2)]
    }
    for path, value in (
        (run / "run.json", about),
        (run / "results.json", {"methods": ["uniform"], "recommended": "uniform", "verdict": "v"}),
        (run / "pool.json", found),
        (method / "result.json", result),
    ):
        path.write_text(json.dumps(value))
    return run


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).write_bytes(content)

    return change


def _fifo(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink()
        os.mkfifo(run / name)

    return change


FILES = ("run.json", "pool.json", "results.json", "methods/uniform/result.json")
SPOILT = [
    *((f"{name}: nested too deeply", _write(name, b'{"a":' + b"[" * 100_000)) for name in FILES),
    *((f"{name}: no UTF-8", _write(name, b'{"a": "\xff"}')) for name in FILES),
    *((f"{name}: one key twice", _write(name, b'{"format": 1, "format": 1}')) for name in FILES),
    *((f"{name}: a list", _write(name, b"[]")) for name in FILES),
    ("weights: junk", _write("methods/uniform/weights.safetensors", b"junk")),
    (
        "weights: a header beyond the file",
        _write("methods/uniform/weights.safetensors", struct.pack("<Q", 2**62)),
    ),
    ("run.json: a FIFO", _fifo("run.json")),
]


def test_the_honest_run_is_reported_and_rebuilt(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert write_report(run).is_file()
    path, _ = rebuild_soup(run)
    assert path == run / "methods" / "uniform" / "soup"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "change"), SPOILT, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_run_of_a_stranger_is_refused(name: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    run = _run(tmp_path)
    change(run)
    with pytest.raises(RunError):
        write_report(run)


@pytest.mark.parametrize(
    "name", ["../../../elsewhere", "/etc", "..", "uniform/../uniform", 5, "", ["uniform"]]
)
def test_a_run_cannot_lead_out_of_its_directory(name: Any, tmp_path: Path) -> None:
    run = _run(tmp_path)
    soup(tmp_path / "elsewhere_made").rename(tmp_path / "elsewhere")
    (run / "results.json").write_text(json.dumps({"recommended": name}))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=r"expected (one that made a soup: uniform|a finished run)"):
        rebuild_soup(run)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content",
    [b"", b"junk", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 2) + b"{}"],
    ids=["empty", "junk", "long", "bare"],
)
def test_a_state_of_a_stranger_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").write_bytes(content)
    with pytest.raises(RunError):
        DiskStore(tmp_path).load()


@pytest.mark.parametrize("values", ["[" * 100_000, "{", "\ud800"])
def test_values_of_a_state_that_cannot_be_read_are_refused(values: str, tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"values": values, "seconds": "1"}}).encode()
    (tmp_path / "state.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(RunError):
        DiskStore(tmp_path).load()


@pytest.mark.timeout(60)
def test_a_note_beside_a_checkpoint_cannot_stop_a_run(tmp_path: Path) -> None:
    opened = pool(tmp_path)
    path = opened.checkpoints[0].path
    os.mkfifo(path.with_suffix(".json"))
    assert trial_settings(path) is None
    path.with_suffix(".json").unlink()
    path.with_suffix(".json").write_text("[" * 100_000)
    assert trial_settings(path) is None
