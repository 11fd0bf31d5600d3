"""What a model expects as input, in the model library's own words translated to ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ImageInput:
    """From any image to the model's: grey or colour, shorter side to `resize`, centre crop to `size`.

    Without `resize` an image is squeezed straight to `size`; without `size` it stays as it is. Pixels stay
    uint8 in memory; `mean` and `std` (for pixels in [0, 1]) are applied on the device by `attach`.
    """

    size: tuple[int, int] | None = None  # (height, width)
    resize: int | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    interpolation: str = "bilinear"
    channels: int | None = None

    def override(self, given: dict[str, Any]) -> ImageInput:
        stated = {k: v for k, v in given.items() if v is not None and k in self.__dataclass_fields__}
        if "size" in stated and "resize" not in stated:
            stated["resize"] = None  # the model's own resize belongs to the model's own size
        return replace(self, **stated)

    def attach(self, model: nn.Module) -> None:
        """Let the model take uint8 images. A hook, not a wrapper: tensor names must not change."""
        model.register_forward_pre_hook(Normalise(self.mean, self.std), with_kwargs=True)


@dataclass(frozen=True)
class LoadedModel:
    """A model with what it says about its input."""

    model: nn.Module
    image: ImageInput | None = None
    tokenizer: Callable[[], Any] | None = None  # loads it when the first text is seen
    max_length: int | None = None  # in tokens
    keywords: bool = False  # batches are dicts of keyword arguments with `labels`, as transformers wants
    purpose: str = ""  # causal (learns the next token, needs no label column), seq2seq, tags, or any other
    vocabulary: int | None = None  # tokens that it has embeddings of
    classes: int | None = None  # the size of its head, where that is known
    class_names: tuple[str, ...] | None = None


class Normalise:
    """Turns uint8 images (n, C, H, W) into the model's floating-point input; leaves all else alone."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = tuple(mean), tuple(std)
        self._there: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

        def image(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 4):
                return value
            mean, std = self._on(value.device)
            return value.float().div_(255).sub(mean).div_(std).to(dtype)

        return tuple(map(image, args)), {name: image(value) for name, value in kwargs.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_there": {}}  # other processes have devices of their own

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Moved once: a copy from the host cannot be part of a CUDA graph."""
        if device not in self._there:
            mean, std = (torch.tensor(x).view(1, -1, 1, 1).to(device) for x in (self.mean, self.std))
            self._there[device] = mean, std
        return self._there[device]
