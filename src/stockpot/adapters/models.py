"""One door to all model libraries, those with models by name, and starting weights from a local checkpoint.

Nothing is downloaded: weights stay random until a pool or a checkpoint of the user gives them. What a library's
transforms do is translated into an `ImageInput` instead of running them, because they end in normalised float32 images,
four times the memory of the uint8 ones that are kept here and normalised on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stockpot.adapters.code import bad_model, call_code, need, silent, unknown_model
from stockpot.files import at_home
from stockpot.pool import open_checkpoint
from stockpot.pool.source import listed

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


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


# Making them ---------------------------------------------------------------------------------------


def load_model(
    kind: str,
    source: Any,
    *,
    folder: Path,
    classes: int | None = None,
    options: dict[str, Any] | None = None,
    weights: Path | None = None,
    pretrained: bool = False,
    auto_class: str | None = None,
    tokenizer: Path | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> LoadedModel:
    """The model on the CPU. Weights it starts with are random, by `seed`, unless `pretrained`."""
    options = dict(options or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "transformers":
            from stockpot.adapters import huggingface

            place = source if isinstance(source, dict) else folder / at_home(source)
            given = {"auto_class": auto_class, "tokenizer": tokenizer, "classes": classes, "pretrained": pretrained}
            given["dtype"] = getattr(torch, dtype)
            loaded = huggingface.load(place, options=options, **given)  # type: ignore[arg-type]
        elif kind == "python":
            if classes is not None:
                options.setdefault("classes", classes)
            model = call_code(source, folder, **options)
            if not isinstance(model, nn.Module):
                found, expected = f"one that returned {type(model).__name__}", "a function that returns an nn.Module"
                raise bad_model(f"python: {source}", expected, found, "return the model itself")
            loaded = LoadedModel(model, classes=classes)
        else:
            by_name = {"timm": load_timm, "torchvision": load_torchvision, "open_clip": load_open_clip}
            loaded = by_name[kind](source, classes, options)
            loaded.model.to(getattr(torch, dtype))
    if pretrained and weights is not None:
        load_weights(loaded.model, weights)
    return loaded


def load_weights(model: nn.Module, path: Path) -> tuple[str, ...]:
    """Copy what fits, read as safely as a pool is; the names that stay as they were come back.

    Only one layer may stay: a head of another size. Anything more is the wrong file.
    """
    checkpoint = open_checkpoint(path)
    own = dict(model.state_dict())
    # A bare encoder's names lack the prefix of the module it is used in here.
    prefixes = ("", *sorted({f"{name.partition('.')[0]}." for name in own}))
    prefix = max(prefixes, key=lambda p: sum(f"{p}{name}" in own for name in checkpoint.specs))
    given = {f"{prefix}{name}": name for name in checkpoint.specs}
    fits = {n for n in own if n in given and tuple(checkpoint.specs[given[n]].shape) == tuple(own[n].shape)}
    left = tuple(name for name in own if name not in fits)
    if not fits or len({name.rpartition(".")[0] for name in left}) > 1:
        expected, fix = "tensors for all of the model except a new head", "give the checkpoint it was pre-trained as"
        raise bad_model(f"weights {path}", expected, f"none that fit {listed(left, 4)}", fix)
    with torch.no_grad():
        for name in sorted(fits):
            own[name].copy_(checkpoint.tensor(given[name]))
    return left


def load_timm(name: str, classes: int | None, options: dict[str, Any]) -> LoadedModel:
    timm = need("timm")
    if name.startswith(("hf-hub:", "hf_hub:")) or not timm.is_model(name):
        raise unknown_model("timm", name, "timm.list_models()", timm.list_models())
    size = {} if classes is None else {"num_classes": classes}
    model = timm.create_model(name, pretrained=False, **size, **options)
    image = timm_image(need("timm.data").resolve_model_data_config(model))
    return LoadedModel(model.float(), image, classes=classes)


def timm_image(config: dict[str, Any]) -> ImageInput:
    """From timm's data configuration: the model sees `crop_pct` of the resized image."""
    channels, height, width = config["input_size"]
    squash = height != width or config.get("crop_mode", "center") == "squash"
    resize = None if squash else int(height / config.get("crop_pct", 0.875))
    how = str(config.get("interpolation", "bicubic"))
    return ImageInput((height, width), resize, tuple(config["mean"]), tuple(config["std"]), how, channels)


def load_torchvision(name: str, classes: int | None, options: dict[str, Any]) -> LoadedModel:
    models = need("torchvision.models")
    if name not in models.list_models():
        raise unknown_model("torchvision", name, "torchvision.models.list_models()", models.list_models())
    size = {} if classes is None else {"num_classes": classes}
    model = models.get_model(name, weights=None, **size, **options)
    best = getattr(models.get_model_weights(name), "DEFAULT", None)  # a few models have no weights at all
    return LoadedModel(model.float(), torchvision_image(best.transforms() if best else None), classes=classes)


def torchvision_image(preset: Any) -> ImageInput:
    """From a classification preset; other presets (video, detection) have no crop and are not for us."""
    if not hasattr(preset, "crop_size"):
        return ImageInput(channels=3)
    crop, how = int(preset.crop_size[0]), getattr(preset.interpolation, "value", preset.interpolation)
    return ImageInput((crop, crop), int(preset.resize_size[0]), tuple(preset.mean), tuple(preset.std), str(how), 3)


def load_open_clip(name: str, classes: int | None, options: dict[str, Any]) -> LoadedModel:
    """The image encoder with a linear head; `text: false` also drops the text tensors that published soups keep."""
    library = need("open_clip")
    if name.startswith("hf-hub:") or name.replace("/", "-") not in library.list_models():
        raise unknown_model("open_clip", name, "open_clip.list_models()", library.list_models())
    if classes is None:
        fix = "add classes: 1000, or however many the checkpoints have"
        raise bad_model("model.open_clip", "model.classes, the size of the linear head", "none", fix)
    normalise, text = bool(options.pop("normalise", True)), bool(options.pop("text", True))
    with silent():  # the library warns of random weights; they come later
        encoder = library.create_model(name, pretrained=None, precision="fp32", pretrained_hf=False, **options)
    visual = encoder.visual
    width = int(getattr(visual, "output_dim", None) or encoder.text_projection.shape[1])
    for part in {**encoder._modules, **encoder._parameters}:
        if part == "transformer" or (part != "visual" and not text):
            delattr(encoder, part)
    size = getattr(visual, "image_size", 224)
    height, across = (size, size) if isinstance(size, int) else tuple(size)
    mean = tuple(getattr(visual, "image_mean", None) or CLIP_MEAN)
    std = tuple(getattr(visual, "image_std", None) or CLIP_STD)
    image = ImageInput((height, across), height if height == across else None, mean, std, "bicubic", 3)
    return LoadedModel(EncoderAndHead(encoder, width, classes, normalise), image=image, classes=classes)


class EncoderAndHead(nn.Module):
    """An image encoder and a linear head on its features, which are scaled to length one as CLIP does.

    Tensor names are those of the published model-soups checkpoints: `model.visual.*` and `classification_head.*`.
    """

    def __init__(self, encoder: nn.Module, width: int, classes: int, normalise: bool = True) -> None:
        super().__init__()
        self.model = encoder
        self.classification_head = nn.Linear(width, classes)
        self.normalise = normalise
        nn.init.zeros_(self.classification_head.bias)

    def forward(self, images: Tensor) -> Tensor:
        features = self.model.encode_image(images)  # type: ignore[operator]  # (n, width)
        if self.normalise:
            features = functional.normalize(features, dim=-1)
        logits: Tensor = self.classification_head(features)  # (n, classes)
        return logits
