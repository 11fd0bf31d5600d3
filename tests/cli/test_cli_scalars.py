"""TensorBoard gets one tag per method, fold and block; the events go on to whoever else listens."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from stockpot.adapters.trackers import scalars
from stockpot.events import Event


class Writer:
    """Stands in for SummaryWriter, whose library is large and optional."""

    written: list[tuple[str, float, int]]

    def __init__(self, path: str) -> None:
        Writer.written = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.append((tag, value, step))

    def close(self) -> None:
        self.written.append(("closed", 0.0, 0))


def test_scalars_are_named_by_method_fold_and_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    passed: list[Event] = []
    (tmp_path / "run").mkdir()
    events = [
        Event("method", {"method": "hl+"}),
        Event("step", {"fold": 1, "block": 0, "step": 3, "loss": 0.5, "lr": 0.01}),
        Event("held_out", {"fold": 1, "block": 0, "step": 4, "loss": 0.6}),
        Event("held_out", {"fold": 1, "block": 0, "step": 5, "loss": None}),
        Event("report", {"method": "hl+", "set": "report", "value": 0.9, "n": 10}),
    ]
    with scalars(tmp_path / "run" / "tensorboard", passed.append) as listen:
        for event in events:
            listen(event)
    assert passed == events
    assert Writer.written == [
        ("hl+/fold1/block0/fit_loss", 0.5, 3),
        ("hl+/fold1/block0/lr", 0.01, 3),
        ("hl+/fold1/block0/held_out_loss", 0.6, 4),
        ("hl+/report", 0.9, 0),
        ("closed", 0.0, 0),
    ]
