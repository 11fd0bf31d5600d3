"""timm: `timm.create_model` and the model's data configuration."""

from __future__ import annotations

from typing import Any

from stockpot.adapters.extras import look_at, need
from stockpot.adapters.inputs import ImageInput, LoadedModel
from stockpot.errors import TaskError, describe


def load(name: str, classes: int | None, options: dict[str, Any]) -> LoadedModel:
    timm = need("timm")
    if name.startswith(("hf-hub:", "hf_hub:")) or not timm.is_model(name):
        raise TaskError(
            describe(
                f"model.timm {name!r}",
                expected="a model name of the installed timm",
                found="an unknown one",
                fix=look_at("timm.list_models()", name, timm.list_models()),
            )
        )
    size = {} if classes is None else {"num_classes": classes}
    model = timm.create_model(name, pretrained=False, **size, **options)
    return LoadedModel(model.float(), image=image_input(need("timm.data").resolve_model_data_config(model)))


def image_input(config: dict[str, Any]) -> ImageInput:
    """From timm's data configuration: `crop_pct` of the resized image is what the model sees."""
    channels, height, width = config["input_size"]
    resize: int | None = int(height / config.get("crop_pct", 0.875))
    if height != width or config.get("crop_mode", "center") == "squash":
        resize = None
    return ImageInput(
        size=(height, width),
        resize=resize,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=str(config.get("interpolation", "bicubic")),
        channels=channels,
    )
