"""OpenCLIP: the image encoder of `open_clip.create_model` with a linear head."""

from __future__ import annotations

from typing import Any

from stockpot.adapters.extras import look_at, need
from stockpot.adapters.inputs import ImageInput, LoadedModel
from stockpot.adapters.models.clip import MEAN, STD, Classifier, need_classes
from stockpot.adapters.quiet import no_log
from stockpot.errors import TaskError, describe


def load(name: str, classes: int | None, options: dict[str, Any]) -> LoadedModel:
    library = need("open_clip")
    if name.startswith("hf-hub:") or name.replace("/", "-") not in library.list_models():
        raise TaskError(
            describe(
                f"model.open_clip {name!r}",
                expected="a model name of the installed open_clip",
                found="an unknown one",
                fix=look_at("open_clip.list_models()", name, library.list_models()),
            )
        )
    head = need_classes(classes, "model.open_clip")
    normalise = bool(options.pop("normalise", True))
    with no_log():  # it warns of random weights; they come later
        encoder = library.create_model(
            name, pretrained=None, precision="fp32", pretrained_hf=False, **options
        )
    visual = encoder.visual
    width = getattr(visual, "output_dim", None) or encoder.text_projection.shape[1]
    if hasattr(encoder, "transformer"):
        del encoder.transformer  # the text side; the published soups drop it too
    size = getattr(visual, "image_size", 224)
    height, across = (size, size) if isinstance(size, int) else tuple(size)
    image = ImageInput(
        size=(height, across),
        resize=height if height == across else None,
        mean=tuple(getattr(visual, "image_mean", None) or MEAN),
        std=tuple(getattr(visual, "image_std", None) or STD),
        interpolation="bicubic",
        channels=3,
    )
    return LoadedModel(Classifier(encoder, int(width), head, normalise), image=image)
