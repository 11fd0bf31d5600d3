"""One door to all model libraries, those with models by name, and starting weights from a local checkpoint.

Nothing is downloaded: weights stay random until a pool or a checkpoint of the user gives them. What a library's
transforms do is translated into an `ImageInput` instead of running them, because they end in normalised float32 images,
four times the memory of the uint8 ones that are kept here and normalised on the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stockpot.adapters import transformers
from stockpot.adapters.code import call_code
from stockpot.adapters.extras import bad_model, need, silent, unknown_model
from stockpot.adapters.inputs import ImageInput, LoadedModel
from stockpot.files import at_home
from stockpot.pool import open_checkpoint

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


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
            place = source if isinstance(source, dict) else folder / at_home(source)
            given = {"auto_class": auto_class, "tokenizer": tokenizer, "classes": classes, "pretrained": pretrained}
            given["dtype"] = getattr(torch, dtype)
            loaded = transformers.load(place, options=options, **given)  # type: ignore[arg-type]
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
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        expected, fix = "tensors for all of the model except a new head", "give the checkpoint it was pre-trained as"
        raise bad_model(f"weights {path}", expected, f"none that fit {shown}", fix)
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
