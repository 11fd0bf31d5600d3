"""Hugging Face transformers: any model class, from local files only; code in model folders never runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stockpot.adapters.code import bad_model, need, said, silent
from stockpot.adapters.models import ImageInput, LoadedModel
from stockpot.errors import TaskError
from stockpot.files import read_json
from stockpot.pool import open_checkpoint
from stockpot.pool.discover import find_checkpoints

_WEIGHTS = [f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json")]
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
# What a configuration may say to make the library fetch or import code of others.
_CODE = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "custom_pipelines")
_ELSEWHERE = {  # options that would change nothing here, and what does
    **dict.fromkeys(("dtype", "torch_dtype"), "write model.dtype: bfloat16"),
    "quantization_config": "load the quantised base in Python and give it to Task; docs/adapters.md says how",
}
# PIL's numbers for resampling filters, which is how processors write them.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def load(
    source: Path | dict[str, Any],
    *,
    auto_class: str | None,
    tokenizer: Path | None,
    classes: int | None,
    options: dict[str, Any],
    pretrained: bool,
    dtype: torch.dtype = torch.float32,
) -> LoadedModel:
    transformers = need("transformers")
    for key, fix in _ELSEWHERE.items():
        if key in options:
            raise bad_model(f"model.options.{key}", "an argument of the configuration", "another one", fix)
    content, folder = _configuration(source)
    content.update(options)
    for key in _CODE:  # a name with a slash is a place to fetch code from
        if key not in options or "/" in str(options[key]):
            content.pop(key, None)
    if classes is not None and len(content.get("id2label") or {}) != classes:
        content.pop("id2label", None)
        content.pop("label2id", None)
        content["num_labels"] = classes
    kind = content.pop("model_type", None)
    config = _try(f"model type {kind!r}", lambda: transformers.AutoConfig.for_model(kind, **content))
    builder = _class(transformers, auto_class, content)
    if pretrained and folder is not None and any((folder / name).is_file() for name in _WEIGHTS):
        open_checkpoint(folder)  # as safely as a pool: what we refuse, the library does not get to see
        model = _pretrained(transformers, builder, folder, config, classes is not None)
    else:
        make = getattr(builder, "from_config", None) or builder._from_config
        model = _try(f"model type {kind!r}", lambda: make(config, **{_word_for_dtype(transformers): dtype}))
    place = tokenizer or folder
    return LoadedModel(
        model.to(dtype),
        image=_try(f"images of {kind!r}", lambda: _image(folder, config)),
        tokenizer=partial(_try, f"tokenizer in {place}", partial(_tokenizer, transformers, place)),
        max_length=_context(model, config),
        keywords=True,
        purpose=_purpose(type(model).__name__),
        vocabulary=_vocabulary(model),
        classes=getattr(config, "num_labels", None),
        class_names=class_names(getattr(config, "id2label", None)),
    )


def _purpose(name: str) -> str:
    auto = need("transformers.models.auto.modeling_auto")
    lists = {"seq2seq": "SEQ_TO_SEQ_CAUSAL_LM", "causal": "CAUSAL_LM", "tags": "TOKEN_CLASSIFICATION"}
    named = {what: getattr(auto, f"MODEL_FOR_{title}_MAPPING_NAMES") for what, title in lists.items()}
    return next((what for what, classes in named.items() if name in classes.values()), "")


def _context(model: Any, config: Any) -> int | None:
    """Tokens at most. Positions of RoBERTa and its relatives begin behind that of padding, which is an entry, too."""
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:  # XLNet says -1: any number
        return None
    tables = (part for name, part in model.named_modules() if name.endswith("position_embeddings"))
    taken = (getattr(one, "padding_idx", None) for one in tables if getattr(one, "num_embeddings", None) == most)
    return most - max((padding + 1 for padding in taken if padding is not None), default=0)


def _vocabulary(model: Any) -> int | None:
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except (NotImplementedError, AttributeError):  # of models that take no tokens
        return None


def _tokenizer(transformers: Any, folder: Path | None) -> Any:
    """The library makes an empty tokenizer, which knows no word, of a folder that holds none."""
    if folder is None:
        fix = "set model.tokenizer to the folder of one"
        raise bad_model("model.transformers", "a folder with a tokenizer", "a configuration alone", fix)
    files = [file.name for file in folder.iterdir() if file.is_file()] if folder.is_dir() else [folder.name]
    if not any(name.startswith(("token", "vocab", "merges", "tekken")) or name.endswith(".model") for name in files):
        fix = "save the tokenizer there (tokenizer.save_pretrained), or set model.tokenizer to its folder"
        raise bad_model(str(folder), "the files of a tokenizer", "none", fix)
    for name in ("tokenizer_config.json", "config.json"):
        content = _json(folder / name) if (folder / name).is_file() else {}
        kind = content.get("tokenizer_class") if isinstance(content, dict) else None
        if kind is not None and not re.fullmatch(r"\w*Tokenizer(Fast|Legacy)?|\w+Backend", str(kind)):
            fix = "correct tokenizer_class"  # the library would call a model by that name, and read its weights
            raise bad_model(str(folder / name), "the class of a tokenizer", repr(kind)[:80], fix)
    return transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)


def class_names(id2label: Any) -> tuple[str, ...] | None:
    """The names of classes 0, 1, ... where a configuration has them all.

    LABEL_0, LABEL_1 are what the library makes up when nobody named the classes.
    """
    names = {str(key): str(name) for key, name in id2label.items()} if isinstance(id2label, dict) else {}
    ordered = tuple(names.get(str(number), "") for number in range(len(names)))
    made_up = all(re.fullmatch(r"LABEL_\d+", name) for name in ordered)
    return None if made_up or "" in ordered or len(set(ordered)) < len(ordered) else ordered


def pool_class_names(sources: Iterable[object]) -> tuple[str, ...] | None:
    """The names that the checkpoints' own configurations give the classes; refused where two of them differ."""
    found: dict[tuple[str, ...], Path] = {}
    for file in (checkpoint / "config.json" for checkpoint in find_checkpoints(sources)[0]):
        content = _json(file) if file.is_file() else None
        if names := class_names(content.get("id2label") if isinstance(content, dict) else None):
            found.setdefault(names, file)
    if len(found) > 1:
        (one, first), (two, second) = list(found.items())[:2]
        expected = f"those of {first}: {', '.join(one)[:200]}"
        fix = "leave out checkpoints that were trained on other labels, or correct id2label"
        raise bad_model(f"class names in {second}", expected, ", ".join(two)[:200], fix)
    return next(iter(found), None)


def _pretrained(transformers: Any, builder: Any, folder: Path, config: Any, new_head: bool) -> Any:
    options = {**_LOCAL, "ignore_mismatched_sizes": new_head, "output_loading_info": True}
    with silent(transformers.utils.logging):
        model, info = _try(str(folder), lambda: builder.from_pretrained(folder, config=config, **options))
    # The library loads what it finds and leaves the rest random: fine for a head, not for a model.
    left, total = len(info["missing_keys"]) + len(info["mismatched_keys"]), len(model.state_dict())
    if 2 * left > total:
        expected, found = f"tensors for {type(model).__name__}", f"none for {left} of its {total} tensors"
        raise bad_model(f"weights in {folder}", expected, found, "check model.auto_class and the folder")
    return model


def _configuration(source: Path | dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    if isinstance(source, dict):
        return dict(source), None
    file = source / "config.json" if source.is_dir() else source
    if not file.is_file():
        found = "a folder without one" if source.is_dir() else "nothing there"
        fix = "download the model first; stockpot reads local files only"
        expected = "a local model folder with a config.json, or such a file"
        raise bad_model(f"model.transformers {source}", expected, found, fix)
    content = _json(file)
    if not isinstance(content, dict) or "model_type" not in content:
        fix = "give the config.json of a transformers model"
        raise bad_model(str(file), "a model configuration with model_type", "none", fix)
    return content, file.parent


def _json(file: Path) -> Any:
    try:
        return read_json(file, follow=True)
    except (OSError, ValueError) as error:
        raise bad_model(str(file), "a JSON configuration", str(error), "correct the file") from error


def _class(transformers: Any, auto_class: str | None, content: dict[str, Any]) -> Any:
    name = auto_class or next(iter(content.get("architectures") or []), None)
    if name is None:
        expected = "a configuration that says its architectures, or model.auto_class"
        fix = "add auto_class: AutoModelForSequenceClassification, or the class you trained"
        raise bad_model("model.transformers", expected, "neither", fix)
    found = getattr(transformers, name, None) if re.fullmatch(r"[A-Z]\w*", str(name)) else None
    if found is None or not hasattr(found, "from_pretrained"):
        fix = "set model.auto_class, such as AutoModelForImageClassification"
        raise bad_model(f"model class {name!r}", "a class of the installed transformers", "an unknown one", fix)
    return found


def _word_for_dtype(transformers: Any) -> str:
    """What the library calls the type of the weights: before 4.56 `dtype` was taken for the model's own argument."""
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


def _try(subject: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except TaskError:
        raise
    except Exception as error:  # the library raises almost anything on a configuration it does not like
        fix = "check the configuration, model.auto_class and model.options"
        raise bad_model(f"transformers, {subject}", "a model that can be built", said(error), fix) from error


def _image(folder: Path | None, config: Any) -> ImageInput | None:
    size, channels = _exact(getattr(config, "image_size", None)), getattr(config, "num_channels", 3)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if folder is not None and (folder / name).is_file():
            content = _json(folder / name)
            content = content.get("image_processor", content)
            if {"image_mean", "size", "do_normalize", "do_resize"} & set(content):
                return processor_image(content, channels)
    return None if size is None else ImageInput(size=size, channels=channels if channels in (1, 3) else None)


def processor_image(content: dict[str, Any], channels: int | None) -> ImageInput:
    """An image processor's configuration in our words; no library needed to read it."""
    size, resize = _geometry(content)
    normalised = content.get("do_normalize", True) and content.get("image_mean") is not None
    mean, std = (content["image_mean"], content["image_std"]) if normalised else ((0.0,), (1.0,))
    factor = content.get("rescale_factor", 1 / 255) if content.get("do_rescale", True) else 1.0
    # Ours: (pixel / 255 - mean) / std. Another factor f means (255 f pixel / 255 - mean) / std.
    scale = 255 * float(factor)
    mean, std = tuple(m / scale for m in mean), tuple(s / scale for s in std)
    how = _FILTERS.get(content.get("resample", 2), "bilinear")
    return ImageInput(size, resize, mean, std, how, channels if channels in (1, 3) else None)


def _geometry(content: dict[str, Any]) -> tuple[tuple[int, int] | None, int | None]:
    """What the model sees, and the shorter side before that; None: squeezed straight to size."""
    given = content.get("size") if content.get("do_resize", True) else None
    size, crop = _exact(given), _exact(content.get("crop_size")) if content.get("do_center_crop") else None
    edge = given.get("shortest_edge") if isinstance(given, dict) else None
    portion = content.get("crop_pct")
    if edge is not None and portion is not None:  # ConvNeXt: small images are cropped, large ones squeezed
        return (edge, edge), int(edge / portion) if edge < 384 else None
    if edge is not None:
        return crop or (edge, edge), edge
    if crop is not None and size is not None and size[0] == size[1]:
        return crop, size[0]
    return crop or size, None


def _exact(size: Any) -> tuple[int, int] | None:
    if isinstance(size, dict) and "height" in size and "width" in size:
        size = (size["height"], size["width"])
    if isinstance(size, (list, tuple)) and len(size) == 2:
        return int(size[0]), int(size[1])
    return (size, size) if isinstance(size, int) else None
