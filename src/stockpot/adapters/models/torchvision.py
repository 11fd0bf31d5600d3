"""torchvision: `torchvision.models.get_model` and the transforms of its default weights (never downloaded)."""

from __future__ import annotations

from typing import Any

from stockpot.adapters.extras import look_at, need
from stockpot.adapters.inputs import ImageInput, LoadedModel
from stockpot.errors import TaskError, describe


def load(name: str, classes: int | None, options: dict[str, Any]) -> LoadedModel:
    models = need("torchvision.models")
    if name not in models.list_models():
        raise TaskError(
            describe(
                f"model.torchvision {name!r}",
                expected="a model name of the installed torchvision",
                found="an unknown one",
                fix=look_at("torchvision.models.list_models()", name, models.list_models()),
            )
        )
    size = {} if classes is None else {"num_classes": classes}
    model = models.get_model(name, weights=None, **size, **options)
    best = getattr(models.get_model_weights(name), "DEFAULT", None)  # a few models have no weights at all
    return LoadedModel(model.float(), image=image_input(best.transforms() if best is not None else None))


def image_input(preset: Any) -> ImageInput:
    """From a classification preset; other presets (video, detection) have no crop and are not for us."""
    if not hasattr(preset, "crop_size"):
        return ImageInput(channels=3)
    crop = int(preset.crop_size[0])
    return ImageInput(
        size=(crop, crop),
        resize=int(preset.resize_size[0]),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        interpolation=str(getattr(preset.interpolation, "value", preset.interpolation)),
        channels=3,
    )
