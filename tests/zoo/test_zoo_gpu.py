"""A search on a CUDA device: alone, by two processes, and in reduced precision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stockpot.events import Event
from stockpot.zoo.folder import read_file
from stockpot.zoo.plan import Augmentation, Plan, Probe, Trial
from stockpot.zoo.search import finetune

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PLAN = Plan(
    tuple(Trial(lr=3e-3, epochs=3, augmentation=0.5, label_smoothing=0.1, seed=n) for n in range(3)),
    batch_size=32,
    probe=Probe(epochs=2),
    augmentation=Augmentation(flip=True, mixup=0.2),
)


def search(out: Path, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 36, 4)
    )
    x = torch.randn(96, 3, 8, 8)
    y = x.mean((2, 3)).argmax(1)
    return finetune(model, (x, y), (x, y), out, PLAN, device="cuda", **options)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_a_search_on_the_device_learns(tmp_path: Path, autocast: torch.dtype | None) -> None:
    records = search(tmp_path, autocast=autocast)
    assert all(not record.failed and record.losses[-1] < record.losses[0] for record in records)
    assert all(
        value.device.type == "cpu" for value in read_file(tmp_path / "trial_000.safetensors", tmp_path)[0].values()
    )


def test_two_processes_share_the_device(tmp_path: Path) -> None:
    alone = search(tmp_path / "one")
    program = f"from pathlib import Path; from test_zoo_gpu import search; search(Path({str(tmp_path / 'two')!r}))"
    with subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parent) as other:
        together = search(tmp_path / "two")
    assert other.returncode == 0
    assert [record.losses for record in together] == [pytest.approx(record.losses, rel=1e-2) for record in alone]


def test_a_killed_trial_continues_on_the_device(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(event: Event) -> None:
        if event.kind == "epoch" and event.data["trial"] == "trial_001":
            raise StopError

    whole = search(tmp_path / "whole")
    with pytest.raises(StopError):
        search(tmp_path / "killed", listen=stop, save_every=0.0)
    again = search(tmp_path / "killed")
    assert again[1].losses == pytest.approx(whole[1].losses, rel=1e-2)
