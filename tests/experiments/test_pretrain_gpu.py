"""Pre-training as a CUDA graph does what it does step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripts import EXPERIMENTS, part
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run by hand on one"),
]


def test_a_captured_step_trains_like_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "fashion-vit"))
    script = part("fashion-vit/pretrain.py")
    ramp = torch.arange(28).view(1, 1, 1, 28) * torch.linspace(2, 9, 64).view(64, 1, 1, 1)
    images = ramp.expand(64, 1, 28, 28).to(torch.uint8)

    def trained() -> tuple[dict[str, Tensor], list[str]]:
        told: list[str] = []
        found: Any = script.pretrain(
            images, epochs=20, batch=32, lr=1e-3, seed=0, device=torch.device("cuda"), say=told.append
        )
        return found.state_dict(), told

    captured, told = trained()
    monkeypatch.setattr(script, "Captured", lambda learn: learn)
    plain, expected = trained()
    assert len(told) == len(expected) == 20
    for line, plainly in zip(told, expected, strict=True):
        assert _loss(line) == pytest.approx(_loss(plainly), abs=0.01)
    assert _loss(told[-1]) < _loss(told[0]) - 0.05
    for name, value in plain.items():
        torch.testing.assert_close(captured[name], value, rtol=1e-2, atol=2e-3)


def _loss(line: str) -> float:
    return float(line.split()[5])  # step 2 of 40  loss 1.0312  0 s
