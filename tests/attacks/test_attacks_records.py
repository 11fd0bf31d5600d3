"""Soups and runs of strangers: loaded, rebuilt, reported on, continued."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attacks.kit import Threat
from attacks.threats_records import SOUPS, pool, soup
from stockpot import Soup, cook
from stockpot.errors import RunError, StockpotError
from stockpot.pool import Pool
from stockpot.report import write_report
from stockpot.run.rebuild import rebuild_soup
from stockpot.run.record import trial_settings
from stockpot.run.state import DiskStore
from stockpot.soup import rebuild
from zoo import zoo


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
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


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
    """A finished run of one soup, whose weights were not kept."""
    opened, task = zoo(folder / "cooked", 2)
    cook(opened, task, "uniform", run=folder / "run")
    shutil.rmtree(folder / "run" / "methods" / "uniform" / "soup")
    return folder / "run"


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
    ("weights: a header beyond the file", _write("methods/uniform/weights.safetensors", struct.pack("<Q", 2**62))),
    ("run.json: a FIFO", _fifo("run.json")),
]


def test_the_honest_run_is_reported_and_rebuilt(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert write_report(run).is_file()
    path, _ = rebuild_soup(run)
    assert path == run / "methods" / "uniform" / "soup"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "change"), SPOILT, ids=lambda value: value if isinstance(value, str) else "")
def test_a_run_of_a_stranger_is_refused(name: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    run = _run(tmp_path)
    change(run)
    with pytest.raises(RunError):
        write_report(run)


@pytest.mark.parametrize("name", ["../../../elsewhere", "/etc", "..", "uniform/../uniform", 5, "", ["uniform"]])
def test_a_run_cannot_lead_out_of_its_directory(name: Any, tmp_path: Path) -> None:
    run = _run(tmp_path)
    soup(tmp_path / "elsewhere_made").rename(tmp_path / "elsewhere")
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**results, "recommended": name}))
    before = sorted(tmp_path.rglob("*"))
    refusals = r"one that made a soup: uniform|a run that recommends a soup|recommended is .* instead of null or a text"
    with pytest.raises(RunError, match=refusals):
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
        DiskStore(tmp_path, tmp_path).load()


@pytest.mark.parametrize(
    "values", [b"[" * 100_000, b"{", b"\xff", b"[]", b'{"seconds": NaN}', b'{"seconds": 1, "peak_host": -1}', b"null"]
)
def test_values_of_a_state_that_cannot_be_read_are_refused(values: bytes, tmp_path: Path) -> None:
    data = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    save_file({"values.json": data}, tmp_path / "state.safetensors")
    with pytest.raises(RunError, match="expected the saved state of an unfinished method"):
        DiskStore(tmp_path, tmp_path).load()


@pytest.mark.timeout(60)
def test_a_note_beside_a_checkpoint_cannot_stop_a_run(tmp_path: Path) -> None:
    opened = pool(tmp_path)
    path = opened.checkpoints[0].path
    os.mkfifo(path.with_suffix(".json"))
    assert trial_settings(path) is None
    path.with_suffix(".json").unlink()
    path.with_suffix(".json").write_text("[" * 100_000)
    assert trial_settings(path) is None
