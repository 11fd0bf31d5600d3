"""EfficientNet-Lite0 for small images, with the tensor names of the published PyTorch state dict.

The Lite variant of Tan and Le's EfficientNet-B0: no squeeze-and-excitation, ReLU6 in place of swish, and a stem
and head of fixed width. The weights were trained in TensorFlow, which decides three details: padding is "same"
(at stride 2 one pixel more at the end than at the start), epsilon of the batch norms is 1e-3, and pixels enter as
(x - 127) / 128, which the recipe says in `data.preprocessing`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

# Expansion, channels, repeats, first stride, kernel.
STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
STEM, HEAD = 32, 1280
EPSILON = 1e-3
# TensorFlow's 0.01 makes running statistics lag behind weights that change within a few hundred steps.
MOMENTUM = 0.1


def build(classes: int = 10, size: int = 96) -> EfficientNetLite0:
    """The model a recipe names; it enlarges its images to `size` itself, so that data stay small."""
    return EfficientNetLite0(classes, size).to(memory_format=torch.channels_last)


class SameConv(nn.Conv2d):
    """Convolution without bias, padded as TensorFlow does: output side = input side / stride, rounded up."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inner, outer, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (top, bottom), (left, right) = (
            _same(side, kernel, stride)
            for side, kernel, stride in zip(x.shape[-2:], self.kernel_size, self.stride, strict=True)
        )
        if (top, left) == (bottom, right):
            return functional.conv2d(x, self.weight, None, self.stride, (top, left), self.dilation, self.groups)
        return super().forward(functional.pad(x, (left, right, top, bottom)))


def _same(side: int, kernel: int, stride: int) -> tuple[int, int]:
    total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


class Block(nn.Module):
    """Expand, filter each channel, project; the input is added where shapes allow."""

    def __init__(self, inner: int, outer: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = inner * expansion
        if expansion > 1:
            self._expand_conv = SameConv(inner, wide, 1)
            self._bn0 = _norm(wide)
        self._depthwise_conv = SameConv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = _norm(wide)
        self._project_conv = SameConv(wide, outer, 1)
        self._bn2 = _norm(outer)
        self.expands = expansion > 1
        self.adds = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = functional.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.adds else y


class EfficientNetLite0(nn.Module):
    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.size = size
        self._conv_stem = SameConv(3, STEM, 3, 2)
        self._bn0 = _norm(STEM)
        self._blocks = nn.ModuleList(_blocks())
        self._conv_head = SameConv(STAGES[-1][1], HEAD, 1)
        self._bn1 = _norm(HEAD)
        self._fc = nn.Linear(HEAD, classes)

    def forward(self, images: Tensor) -> Tensor:  # (n, 3, H, W), normalised -> (n, classes)
        return self._fc(self.features(images))

    def features(self, images: Tensor) -> Tensor:  # -> (n, 1280)
        if images.shape[-2:] != (self.size, self.size):
            images = functional.interpolate(images, size=(self.size, self.size), mode="bilinear")
        x = images.contiguous(memory_format=torch.channels_last)
        x = functional.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = functional.relu6(self._bn1(self._conv_head(x)))
        return x.mean(dim=(2, 3))


def _blocks() -> list[Block]:
    made = []
    outputs = (STEM, *(channels for _, channels, *_ in STAGES))
    for (inner, outer), (expansion, _, repeats, stride, kernel) in zip(pairwise(outputs), STAGES, strict=True):
        made.append(Block(inner, outer, expansion, kernel, stride))
        made.extend(Block(outer, outer, expansion, kernel, 1) for _ in range(repeats - 1))
    return made


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=EPSILON, momentum=MOMENTUM)
