"""timm and torchvision through their adapters, from files to soup. They have no CPU build to test with elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stockpot.adapters.models import timm as timm_models
from stockpot.adapters.models import torchvision as torchvision_models
from stockpot.pool import Pool
from stockpot.soups import cook
from stockpot.task import Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run by hand on one"),
]


@pytest.mark.parametrize(
    ("load", "name", "size"),
    [
        (timm_models.load, "vit_tiny_patch16_224", 224),
        (timm_models.load, "resnet10t", 64),
        (torchvision_models.load, "resnet18", 64),
        (torchvision_models.load, "efficientnet_b0", 64),
    ],
    ids=["timm-vit", "timm-resnet", "torchvision-resnet", "torchvision-efficientnet"],
)
def test_a_model_of_the_library_is_cooked(load: object, name: str, size: int, tmp_path: Path) -> None:
    assert callable(load)
    loaded = load(name, 5, {})
    assert loaded.image is not None
    assert len(loaded.image.mean) == 3
    base = loaded.model.state_dict()
    for k in range(4):
        generator = torch.Generator().manual_seed(k)
        state = {
            n: (v + 0.01 * torch.randn(v.shape, generator=generator) * v.abs().mean()).abs()
            if n.endswith("running_var")
            else v + 0.01 * torch.randn(v.shape, generator=generator)
            if v.is_floating_point()
            else v
            for n, v in base.items()
        }
        save_file(state, tmp_path / f"m{k}.safetensors")
    data = (torch.rand(32, 3, size, size), torch.arange(32) % 5)
    task = Task(loaded.model.cuda(), data, data)
    result = cook(Pool.open(tmp_path), task, "mehl+", steps=20, batch_size=16, block_size=2)
    assert result.soup is not None
    assert result.report is not None
    assert torch.allclose(result.soup.W.sum(0), torch.ones(result.soup.W.shape[1], dtype=torch.float64))
    statistics = [n for n in base if n.endswith("running_mean")]
    assert (result.soup.statistics is not None) == bool(statistics)  # BatchNorm was recalibrated
    assert task.score().mean == result.fit.mean if result.fit else False  # the model holds the soup
