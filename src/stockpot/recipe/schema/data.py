"""`data`: where samples come from, which columns matter, and how they are divided."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from typing_extensions import Self

from stockpot.recipe.schema.base import (
    Bytes,
    Code,
    Names,
    PythonCode,
    Section,
    exactly_one,
    word_of,
    word_or_code,
)
from stockpot.recipe.schema.split import ShortSplit, Split

DATA_KINDS = ("images", "table", "dataset", "arrays", "idx", "cifar", "python")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
METRICS = ("accuracy", "loss")


def _pair(value: Any) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) and not isinstance(value, bool) else value
    if (
        isinstance(pair, (list, tuple))
        and len(pair) == 2
        and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in pair)
    ):
        return pair[0], pair[1]
    raise ValueError(f"expected a size in pixels or [height, width], found {value!r}")


Pixels = Annotated[
    tuple[int, int],
    BeforeValidator(_pair),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer"},
                {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
            ]
        }
    ),
]
Interpolation: Any = word_of(INTERPOLATIONS)


class Preprocessing(Section):
    """What is given here replaces what the model says about its own input."""

    size: Pixels | None = Field(None, description="Height and width the model sees.")
    resize: int | None = Field(
        None, ge=1, description="Shorter side before the centre crop. Default: squeezed straight to `size`."
    )
    mean: tuple[float, ...] | None = Field(None, description="Per channel, for pixels scaled to [0, 1].")
    std: tuple[float, ...] | None = Field(None, description="Per channel, for pixels scaled to [0, 1].")
    interpolation: Interpolation | None = Field(None, description="How images are resized.")
    channels: int | None = Field(None, description="1 for grey, 3 for colour.")
    max_length: int | None = Field(None, ge=1, description="Tokens a text is cut to.")

    @model_validator(mode="after")
    def _channels(self) -> Self:
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels: expected 1 or 3, found {self.channels}")
        if self.std is not None and any(v <= 0 for v in self.std):
            raise ValueError(f"std: expected positive numbers, found {list(self.std)}")
        return self


Metric: Any = word_or_code(METRICS)


class Data(Section):
    """The samples coefficients are learned on (`fit`) and results are reported on (`report`)."""

    images: str | None = Field(
        None, description="Folder with one sub-folder of images per class. Needs `stockpot[images]`."
    )
    table: str | None = Field(
        None,
        description="CSV, TSV, JSONL or Parquet file, or the folder such files are in. "
        "Parquet needs `stockpot[tables]`.",
    )
    dataset: str | None = Field(
        None,
        description="Hugging Face dataset on disk (`save_to_disk`); parts are its splits. "
        "Needs `stockpot[tables]`.",
    )
    arrays: str | None = Field(
        None,
        description="`.npz` or `.safetensors` file, a folder of `.npy` files, or the folder such files are in. "
        "Arrays without a named part: `x` (or the only other array) and `y`, `label`, `labels` or `target`. "
        "A part named `test` is a file `test.npz`, or the arrays `x_test` and `y_test` (also `test_x`, `test_y`); "
        "so are `x_train`, `y_train` of a part named `train`.",
    )
    idx: str | None = Field(
        None, description="Folder of idx files (MNIST family, plain or .gz); parts `train` and `test`."
    )
    cifar: str | None = Field(
        None,
        description="Folder of CIFAR-10 or CIFAR-100 python batches; parts `train` and `test`. "
        "Read without running any code in them.",
    )
    python: Code | None = Field(
        None,
        description="`module:function`, called with `train`, `fit` or `report`; returns tensors, a Dataset, a "
        "DataLoader, or None where there is no such split.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments for the python function."
    )
    text: Names | None = Field(None, description="Column with text; two columns for pairs of texts.")
    image: str | None = Field(None, description="Column with images or paths of images.")
    features: Names | None = Field(None, description="Column or columns with numbers.")
    tokens: str | None = Field(
        None,
        description="Column with token ids, all of one length; `attention_mask` is taken along if there is one.",
    )
    label: str | None = Field(None, description="Column with the class. Default: `label`, `labels` or `y`.")
    classes: tuple[str, ...] | None = Field(
        None,
        description="Names of the classes in the order of the head. Default: the model's own names, "
        "or all names in the data, sorted.",
    )
    train: ShortSplit | None = Field(None, description="Samples that `finetune` trains on.")
    fit: ShortSplit | None = Field(
        None,
        description="Samples the method may look at. A fraction (0.5), a number of samples, a named part "
        "(a file, sub-folder or split), or a mapping. Default: half.",
    )
    report: ShortSplit | None = Field(
        None,
        description="Samples touched once, at the end. Never overlaps `fit`. "
        "Default: the other half; none if only `fit` is given.",
    )
    split_seed: int = Field(0, ge=0, description="Which samples fall into which fraction.")
    preprocessing: Preprocessing = Field(
        default_factory=lambda: Preprocessing.model_validate({}),
        description="Replaces parts of what the model says about its own input.",
    )
    batch_size: int = Field(256, ge=1, description="Batch for evaluation.")
    memory_limit: Bytes = Field(
        8 * 2**30, description="Decoded data that may be kept in memory, such as `8GiB`."
    )
    cache: str | None = Field(
        None,
        description="Folder for decoded images: they are kept there in files, mapped instead of held in memory "
        "(so that `memory_limit` does not count them), and found again by later commands. Default: none.",
    )
    metric: Metric = Field(
        "accuracy", description="`accuracy`, `loss`, or `{python: module:function}`; higher is better."
    )
    loss: PythonCode | None = Field(
        None,
        description="`{python: module:function}` called with model and batch. Default: cross-entropy, "
        "or the model's own loss.",
    )

    @model_validator(mode="before")
    @classmethod
    def _halves(cls, given: Any) -> Any:
        # Splits that are not mentioned at all mean half and half; written out so that the resolved recipe says so.
        if isinstance(given, dict) and "fit" not in given and given.get("python") is None:
            if given.get("report") is not None or given.get("train") is not None:
                return given
            return {**given, "fit": 0.5, "report": 0.5}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        exactly_one(self, DATA_KINDS)
        splits = {name: s for name in ("train", "fit", "report") if (s := getattr(self, name)) is not None}
        if self.python is not None:
            if splits:
                raise ValueError(f"{next(iter(splits))}: the python function makes the splits itself")
            return self
        if self.fit is None:
            raise ValueError("fit: required when train or report is given")
        inputs = [name for name in ("text", "image", "features", "tokens") if getattr(self, name) is not None]
        if len(inputs) > 1:
            raise ValueError(
                f"expected at most one of text, image, features, tokens, found {' and '.join(inputs)}"
            )
        if self.text is not None and len(self.text) > 2:
            raise ValueError(f"text: expected one or two columns, found {len(self.text)}")
        _disjoint(splits)
        return self

    @property
    def kind(self) -> str:
        return next(kind for kind in DATA_KINDS if getattr(self, kind) is not None)


def _disjoint(splits: dict[str, Split]) -> None:
    """Two splits may share a part only in fractions or counts that leave room for each other."""
    by_part: dict[str | None, dict[str, Split]] = {}
    for name, split in splits.items():
        if split.rows is None:
            by_part.setdefault(split.of, {})[name] = split
    for part, sharing in by_part.items():
        whole = [name for name, s in sharing.items() if s.fraction is None and s.count is None]
        where = "the data" if part is None else f"part {part!r}"
        if whole and len(sharing) > 1:
            raise ValueError(
                f"{' and '.join(sharing)} would share samples: {whole[0]} takes all of {where}; "
                f"give each a fraction, such as {{of: {part}, fraction: 0.5}}"
            )
        total = sum(s.fraction or 0.0 for s in sharing.values())
        if total > 1 + 1e-9:
            raise ValueError(
                f"the fractions of {' and '.join(sharing)} add up to {total:g}, more than {where} has"
            )
