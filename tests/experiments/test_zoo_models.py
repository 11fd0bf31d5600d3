"""The zoos' own architectures: names, sizes, and the details their weights depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripts import part
from torch.nn import functional


@pytest.fixture(scope="module")
def efficientnet() -> Any:
    return part("cifar10-efficientnet/model.py")


@pytest.fixture(scope="module")
def vit() -> Any:
    return part("fashion-vit/model.py")


def published_shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the published file, written out from the architecture's table rather than from our code."""
    shapes: dict[str, tuple[int, ...]] = {"_conv_stem.weight": (32, 3, 3, 3)}

    def norm(name: str, width: int) -> None:
        shapes.update({f"{name}.{s}": (width,) for s in ("weight", "bias", "running_mean", "running_var")})
        shapes[f"{name}.num_batches_tracked"] = ()

    norm("_bn0", 32)
    kernels = (3, 3, 3, 5, 5, 3, 3, 3, 5, 5, 5, 5, 5, 5, 5, 3)
    widths = (32, 16, 24, 24, 40, 40, 80, 80, 80, 112, 112, 112, 192, 192, 192, 192, 320)
    for n, (kernel, inner, outer) in enumerate(zip(kernels, widths, widths[1:], strict=False)):
        wide = inner if n == 0 else 6 * inner
        if n:
            shapes[f"_blocks.{n}._expand_conv.weight"] = (wide, inner, 1, 1)
            norm(f"_blocks.{n}._bn0", wide)
        shapes[f"_blocks.{n}._depthwise_conv.weight"] = (wide, 1, kernel, kernel)
        norm(f"_blocks.{n}._bn1", wide)
        shapes[f"_blocks.{n}._project_conv.weight"] = (outer, wide, 1, 1)
        norm(f"_blocks.{n}._bn2", outer)
    shapes["_conv_head.weight"] = (1280, 320, 1, 1)
    norm("_bn1", 1280)
    return shapes | {"_fc.weight": (1000, 1280), "_fc.bias": (1000,)}


def test_efficientnet_takes_the_published_state_dict(efficientnet: Any) -> None:
    state = {name: torch.zeros(shape) for name, shape in published_shapes().items()}
    model = efficientnet.build(classes=1000)
    model.load_state_dict(state, strict=True)
    assert sum(p.numel() for p in model.parameters()) == 4_652_008


def test_efficientnet_norms_are_those_of_its_weights(efficientnet: Any) -> None:
    norms = [m for m in efficientnet.build().modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.1)}


@pytest.mark.parametrize(("side", "kernel", "stride", "before", "after"), [
    (8, 3, 2, 0, 1),
    (8, 5, 2, 1, 2),
    (7, 3, 2, 1, 1),
    (7, 5, 2, 2, 2),
    (8, 3, 1, 1, 1),
    (7, 5, 1, 2, 2),
    (8, 1, 1, 0, 0),
])  # fmt: skip
def test_padding_is_that_of_tensorflow(
    efficientnet: Any, side: int, kernel: int, stride: int, before: int, after: int
) -> None:
    conv = efficientnet.SameConv(2, 2, kernel, stride)
    x = torch.randn(1, 2, side, side)
    padded = functional.pad(x, (before, after, before, after))
    torch.testing.assert_close(conv(x), functional.conv2d(padded, conv.weight, stride=stride))
    assert conv(x).shape[-1] == -(-side // stride)


def test_efficientnet_enlarges_small_images_itself(efficientnet: Any) -> None:
    model = efficientnet.build(size=64).eval()
    seen: list[torch.Tensor] = []
    model._conv_stem.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    images = torch.randn(2, 3, 32, 32)
    model(images)
    torch.testing.assert_close(seen[0], functional.interpolate(images, size=(64, 64), mode="bilinear"))


def test_vision_transformer_is_small_and_knows_where_patches_are(vit: Any) -> None:
    torch.manual_seed(0)
    model = vit.build().eval()
    assert 2.4e6 < sum(p.numel() for p in model.parameters()) < 2.8e6
    images = torch.randn(3, 1, 28, 28)
    assert model(images).shape == (3, 10)
    swapped = torch.cat((images[..., 14:16], images[..., 2:14], images[..., :2], images[..., 16:]), dim=-1)
    moved = images.roll(4, dims=-1)  # the same patches, elsewhere
    assert not torch.allclose(model(images), model(moved), atol=1e-5)
    assert not torch.allclose(model(images), model(swapped), atol=1e-5)


def test_patches_are_squares_in_reading_order(vit: Any) -> None:
    images = torch.arange(28 * 28.0).view(1, 1, 28, 28)
    found = vit.patches(images)
    assert found.shape == (1, 49, 16)
    torch.testing.assert_close(found[0, 8], images[0, 0, 4:8, 4:8].flatten())


def test_encoder_sees_only_kept_patches(vit: Any) -> None:
    model = vit.build(width=24, depth=1, heads=2)
    pixels, kept = torch.randn(2, 49, 16), torch.tensor([[3, 1, 40], [0, 48, 7]])
    other = pixels.clone()
    other[0, 2] += 1
    other[1, 8] += 1
    seen = model.encode(pixels, kept)
    assert seen.shape == (2, 3, 24)
    torch.testing.assert_close(seen, model.encode(other, kept))
    other[0, 40] += 1
    assert not torch.allclose(seen, model.encode(other, kept))
