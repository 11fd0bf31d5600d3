"""timm, torchvision and open_clip through their adapters. They have no CPU build to test with elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stand_in_open_clip import TINY, Clip
from stockpot import cook
from stockpot.adapters.models import load_model, load_timm, load_torchvision
from stockpot.pool import Pool
from stockpot.task import Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run by hand on one"),
]


@pytest.mark.parametrize(
    ("load", "name", "size"),
    [
        (load_timm, "vit_tiny_patch16_224", 224),
        (load_timm, "resnet10t", 64),
        (load_torchvision, "resnet18", 64),
        (load_torchvision, "efficientnet_b0", 64),
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
    assert result.fit is not None
    assert task.score().value == result.fit.value  # the model holds the soup


def test_open_clip_has_the_names_and_the_arithmetic_that_other_tests_take_for_it() -> None:
    """Checked on 2026-11-18 with open_clip_torch 3.3.0 on a CPU: the same names, equal to the last bit."""
    pytest.importorskip("open_clip")
    load = {"folder": Path(), "classes": 3, "options": TINY}
    real: Any = load_model("open_clip", "ViT-B-32-quickgelu", **load).model.eval()  # type: ignore[arg-type]
    stand_in = Clip(**TINY).eval()
    encoder = {n.removeprefix("model."): t for n, t in real.state_dict().items() if n.startswith("model.")}
    missing, unexpected = stand_in.load_state_dict(encoder, strict=False)
    assert unexpected == []
    assert all(name.startswith("transformer.") for name in missing)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(real.model.encode_image(images), stand_in.encode_image(images))
