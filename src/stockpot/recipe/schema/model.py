"""`model`: the architecture the checkpoints belong to, and how it runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from typing_extensions import Self

from stockpot.recipe.schema.base import Code, Section, exactly_one

MODEL_KINDS = ("transformers", "timm", "torchvision", "open_clip", "clip", "python")


def _path_or_config(value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, dict) and isinstance(value.get("model_type"), str):
        return value
    raise ValueError(f"expected a local folder, a config.json or a mapping with model_type, found {value!r}")


PathOrConfig = Annotated[
    Any,
    AfterValidator(lambda v: v if v is None else _path_or_config(v)),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]


class Model(Section):
    """The model the checkpoints belong to: exactly one of the kinds, and how it runs."""

    transformers: PathOrConfig = Field(
        None,
        description="Hugging Face transformers: a local model folder, a `config.json`, or the configuration "
        "itself as a mapping with `model_type`. Nothing is downloaded. Needs `stockpot[transformers]`.",
    )
    timm: str | None = Field(None, description="A model name of timm. Needs `stockpot[vision]`.")
    torchvision: str | None = Field(
        None, description="A model name of torchvision. Needs `stockpot[vision]`."
    )
    open_clip: str | None = Field(
        None,
        description="An OpenCLIP model name: its image encoder with a linear head. Needs `stockpot[clip]`.",
    )
    clip: str | None = Field(
        None,
        description="An OpenAI CLIP image transformer with a linear head, built in: `ViT-B-32`, `ViT-B-16`, "
        "`ViT-L-14`, `ViT-L-14-336`. Tensor names are those of the published model-soups checkpoints.",
    )
    python: Code | None = Field(
        None,
        description="`module:function` that returns the `nn.Module`; looked for beside the recipe first.",
    )
    auto_class: str | None = Field(
        None,
        description="For `transformers`: the AutoModel class, such as `AutoModelForSequenceClassification`. "
        "Default: taken from the configuration's `architectures`.",
    )
    tokenizer: str | None = Field(
        None, description="For `transformers`: folder of the tokenizer. Default: the model folder."
    )
    classes: int | None = Field(None, ge=1, description="Size of the head. Default: the model's own.")
    weights: str | None = Field(
        None,
        description="A local checkpoint `finetune` starts from. `transformers` folders hold their own; "
        "cooking takes all weights from the pool.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments for the model's constructor or python function."
    )
    device: str = Field(
        "auto", description="`auto` (a GPU where there is one), `cpu`, `cuda`, `cuda:1`, `mps`."
    )
    autocast: Literal["none", "bfloat16", "float16"] = Field(
        "none", description="Compute type of mixed precision. Weights stay as they are."
    )
    statistics: Literal["recalibrate", "average", "copy"] = Field(
        "recalibrate",
        description="What happens to BatchNorm statistics of a soup: measured again on the fitting data, "
        "averaged like weights, or copied from the donor.",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        exactly_one(self, MODEL_KINDS)
        for name in ("auto_class", "tokenizer"):
            if getattr(self, name) is not None and self.transformers is None:
                raise ValueError(f"{name}: only for transformers models")
        return self

    @property
    def kind(self) -> str:
        return next(kind for kind in MODEL_KINDS if getattr(self, kind) is not None)
