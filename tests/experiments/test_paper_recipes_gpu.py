"""The recipes on a device, with torchvision's own network. It has no CPU build to test with elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from paper_files import CLASSES, cifar, imagenet, published_soups
from test_paper_recipes import compared, overrides, recipe_of, stockpot

import stand_in_open_clip
from stand_in_open_clip import TINY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run by hand on one"),
]
DEVICE: dict[str, Any] = {"model__device": "cuda", "model__autocast": "bfloat16"}


def test_resnet_101_is_fine_tuned_on_cifar_and_compared(tmp_path: Path) -> None:
    models = importlib.import_module("torchvision.models")
    cifar(tmp_path / "data" / "cifar-100-python", 100, 200, 100)
    (tmp_path / "data" / "torchvision").mkdir()
    torch.save(models.resnet101(weights=None).state_dict(), tmp_path / "data/torchvision/resnet101.pt")
    small = {"finetune__trials": 3, "finetune__epochs": 1, "finetune__probe_epochs": 1, **DEVICE}
    recipe = recipe_of("resnet-101-cifar100")
    sets = overrides(tmp_path, **small, data__preprocessing__size=64, data__preprocessing__resize=64)
    stockpot("finetune", recipe, sets=sets)
    assert set(compared(recipe, sets, "best", "uniform", "mehl+")) == {"best", "uniform", "mehl+"}
    statistics = tmp_path / "runs/paper/resnet-101-cifar100/compare/methods/mehl-plus/statistics.safetensors"
    assert statistics.exists()  # BatchNorm was recalibrated


def test_the_published_soups_are_compared_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("open_clip") is None:
        stand_in_open_clip.install(monkeypatch)
    published_soups(tmp_path / "data" / "model-soups", 6)
    imagenet(tmp_path / "data" / "imagenet")
    sets = overrides(tmp_path, model__options=TINY, model__classes=len(CLASSES), **DEVICE)
    assert len(compared(recipe_of("vit-b-32-imagenet"), sets)) == 11
