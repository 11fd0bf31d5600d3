"""Hugging Face transformers: any model class, from local files only; code in model folders never runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from stockpot.adapters.extras import need
from stockpot.adapters.inputs import ImageInput, LoadedModel, TextInput
from stockpot.adapters.models.processor import image_input
from stockpot.adapters.quiet import no_bars
from stockpot.errors import TaskError, describe
from stockpot.pool import open_checkpoint
from stockpot.small_files import read_json

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# What a configuration may say to make the library fetch or import code of others.
_CODE = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "custom_pipelines",
)


def load(
    source: Path | dict[str, Any],
    *,
    auto_class: str | None,
    tokenizer: Path | None,
    classes: int | None,
    options: dict[str, Any],
    pretrained: bool,
) -> LoadedModel:
    transformers = need("transformers")
    content, folder = _content(source)
    content.update(options)
    for key in _CODE:
        if key not in options or "/" in str(
            options[key]
        ):  # a name with a slash is a place to fetch code from
            content.pop(key, None)
    if classes is not None:
        _set_classes(content, classes)
    kind = content.pop("model_type", None)
    config = _try(f"model type {kind!r}", lambda: transformers.AutoConfig.for_model(kind, **content))
    builder = _class(transformers, auto_class, content)
    if pretrained and folder is not None and any((folder / name).is_file() for name in _WEIGHTS):
        open_checkpoint(folder)  # as safely as a pool: what we refuse, the library does not get to see
        model = _pretrained(transformers, builder, folder, config, classes is not None)
    else:
        make = getattr(builder, "from_config", None) or builder._from_config
        model = _try(f"model type {kind!r}", lambda: make(config))
    name = auto_class or type(model).__name__
    return LoadedModel(
        model.float(),
        image=_image(folder, config),
        text=_text(transformers, tokenizer or folder, config),
        keywords=True,
        language=name.endswith("CausalLM"),
        class_names=_class_names(config),
    )


def _pretrained(transformers: Any, builder: Any, folder: Path | None, config: Any, new_head: bool) -> Any:
    with no_bars(transformers.utils.logging):
        model, info = _try(
            str(folder),
            lambda: builder.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=new_head,
                output_loading_info=True,
            ),
        )
    # The library loads what it finds and leaves the rest random: fine for a head, not for a model.
    left, total = len(info["missing_keys"]) + len(info["mismatched_keys"]), len(model.state_dict())
    if 2 * left > total:
        raise TaskError(
            describe(
                f"weights in {folder}",
                expected=f"tensors for {type(model).__name__}",
                found=f"none for {left} of its {total} tensors",
                fix="check model.auto_class and the folder",
            )
        )
    return model


def _content(source: Path | dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    if isinstance(source, dict):
        return dict(source), None
    file = source / "config.json" if source.is_dir() else source
    if not file.is_file():
        raise TaskError(
            describe(
                f"model.transformers {source}",
                expected="a local model folder with a config.json, or such a file",
                found="a folder without one" if source.is_dir() else "nothing there",
                fix="download the model first; stockpot reads local files only",
            )
        )
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise TaskError(
            describe(str(file), expected="a JSON configuration", found=str(error), fix="correct the file")
        ) from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise TaskError(
            describe(
                str(file),
                expected="a model configuration with model_type",
                found="none",
                fix="give the config.json of a transformers model",
            )
        )
    return content, file.parent


def _object(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    return content


def _set_classes(content: dict[str, Any], classes: int) -> None:
    if len(content.get("id2label") or {}) != classes:
        content.pop("id2label", None)
        content.pop("label2id", None)
        content["num_labels"] = classes


def _class(transformers: Any, auto_class: str | None, content: dict[str, Any]) -> Any:
    name = auto_class or next(iter(content.get("architectures") or []), None)
    if name is None:
        raise TaskError(
            describe(
                "model.transformers",
                expected="a configuration that says its architectures, or model.auto_class",
                found="neither",
                fix="add auto_class: AutoModelForSequenceClassification, or the class you trained",
            )
        )
    found = getattr(transformers, name, None) if re.fullmatch(r"[A-Z]\w*", name) else None
    if found is None or not hasattr(found, "from_pretrained"):
        raise TaskError(
            describe(
                f"model class {name!r}",
                expected="a class of the installed transformers",
                found="an unknown one",
                fix="set model.auto_class, such as AutoModelForImageClassification",
            )
        )
    return found


def _try(subject: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except TaskError:
        raise
    except Exception as error:  # the library raises almost anything on a configuration it does not like
        raise TaskError(
            describe(
                f"transformers, {subject}",
                expected="a model that can be built",
                found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                fix="check the configuration, model.auto_class and model.options",
            )
        ) from error


def _image(folder: Path | None, config: Any) -> ImageInput | None:
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if folder is not None:
        for name in ("preprocessor_config.json", "processor_config.json"):
            if (folder / name).is_file():
                content = _try(str(folder / name), partial(_object, folder / name))
                content = content.get("image_processor", content)
                if {"image_mean", "size", "do_normalize", "do_resize"} & set(content):
                    return image_input(content, channels)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return ImageInput(size=(height, width), channels=channels if channels in (1, 3) else None)


def _text(transformers: Any, folder: Path | None, config: Any) -> TextInput | None:
    if folder is None:
        return None

    def tokenizer() -> Any:
        return _try(
            f"tokenizer in {folder}",
            lambda: transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            ),
        )

    return TextInput(tokenizer, getattr(config, "max_position_embeddings", None))


def _class_names(config: Any) -> tuple[str, ...] | None:
    names = getattr(config, "id2label", None) or {}
    ordered = tuple(str(names[key]) for key in sorted(names, key=int))
    # LABEL_0, LABEL_1 are what the library makes up when nobody named the classes.
    return None if not ordered or all(re.fullmatch(r"LABEL_\d+", n) for n in ordered) else ordered
