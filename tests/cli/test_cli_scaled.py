"""`stockpot inspect RECIPE --ranks N --memory SIZE`: what many GPUs would do."""

from __future__ import annotations

import json
from pathlib import Path

from cli.conftest import Stockpot


def test_inspect_forecasts_a_step_on_many_gpus(folder: Path, stockpot: Stockpot) -> None:
    asked = ("inspect", folder / "recipe.yaml", "--set", "method.name=hl+", "--ranks", 64, "--memory", "80GB")
    answer = stockpot(*asked)
    assert answer.code == 0, answer.err
    assert "hl+ on 64 GPUs, batches of 128: computed, not measured" in answer.out
    assert "data: each takes a part of every batch" in answer.out
    value = json.loads(stockpot(*asked, "--json").out)
    found = value["scaled"]
    models = len(value["ingredients"])
    assert (found["ranks"], found["block"], found["fits"], found["fsdp"]) == (64, models, True, 0)
    assert found["coefficients"] == 4 * (models * value["tensors"] + 2)
    assert found["ddp"] == 2 * 4 * value["parameters"] * 63 // 64
    slow = json.loads(stockpot(*asked, "--bandwidth", "10MB", "--json").out)["scaled"]
    sent = found["coefficients"] * 12  # twice the six doublings to 64
    assert slow["seconds"][0] - found["seconds"][0] > 0.9 * sent / 1e7


def test_a_model_that_needs_its_weights_has_no_time_in_the_forecast(folder: Path, stockpot: Stockpot) -> None:
    toy = folder / "toy.py"
    forward = "def forward(self, x):\n        return super().forward(x) * float(self[0].bias.sum())\n"
    own = f"class Own(nn.Sequential):\n    {forward}"
    text = toy.read_text().replace("def model():\n    return nn.Sequential(", own + "\ndef model():\n    return Own(")
    toy.write_text(text)
    answer = stockpot("inspect", folder / "recipe.yaml", "--ranks", 2, "--memory", "80GB")
    assert answer.code == 0, answer.err
    assert "time per step                 not known: the model does not run without its weights (" in answer.out


def test_ranks_without_what_they_need_are_refused(folder: Path, stockpot: Stockpot) -> None:
    for asked, missing in (
        ((folder / "pool", "--ranks", 4, "--memory", "80GB"), "needs a recipe"),
        ((folder / "recipe.yaml", "--ranks", 4), "needs the memory of one GPU: --memory 80GB"),
        ((folder / "recipe.yaml", "--ranks", 4, "--memory", "80GB", "--bandwidth", "fast"), "--bandwidth: "),
    ):
        answer = stockpot("inspect", *asked)
        assert answer.code != 0
        assert missing in answer.err
