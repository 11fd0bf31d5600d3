"""`method`: how mixing weights are found. Field names are those of `stockpot.soups.settings.Settings`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from typing_extensions import Self

from stockpot.errors import MethodError
from stockpot.recipe.schema.base import Bytes, Names, PythonCode, Section, word_of, word_or_code
from stockpot.soups.setting_checks import StartName
from stockpot.soups.settings import METHODS, PRESETS, Settings, settings_for

MethodName: Any = word_of(METHODS)
PresetName: Any = word_of(PRESETS)
SETTINGS = tuple(f.name for f in dataclasses.fields(Settings))
GRANULARITIES = ("model", "block", "module", "tensor")

# What tells methods apart: in a comparison the method's name decides these, not the recipe.
_SWITCHES = {
    "parametrisation",
    "granularity",
    "folds",
    "guard",
    "retreat",
    "advance",
    "smooth",
    "start",
}
_BLOCKWISE = {"mehl", "mehl+", "crossfit"}
_HYPERPLANE_ONLY = {"decentralise", "centre", "unit_norm", "reset"}
# Settings whose default is the same for every method and preset, so that a resolved recipe can state them.
_VARIABLE = {key for source in (METHODS, PRESETS) for chosen in source.values() for key in chosen} | {
    "lr",
    "weight_decay",
    "block_size",
    "seed",
}


Granularity: Any = word_or_code(GRANULARITIES)


def _block_size(value: object) -> object:
    if value is None or value in ("auto", "fit") or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"expected a whole number, auto, fit or null, found {value!r}")


BlockSize = Annotated[
    int | str | None,
    BeforeValidator(_block_size),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["auto", "fit"]}, {"type": "null"}]}
    ),
]


def _donor(value: object) -> object:
    if (isinstance(value, str) and value) or (
        isinstance(value, int) and not isinstance(value, bool) and value >= 0
    ):
        return value
    raise ValueError(f"expected the name or the number of an ingredient, found {value!r}")


Donor = Annotated[
    int | str,
    BeforeValidator(_donor),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}),
]


class Method(Section):
    """How mixing weights are found. A setting that is not given comes from the method and the preset."""

    name: MethodName = Field("crossfit", description="The method `cook` uses.")
    preset: PresetName | None = Field(
        None, description="`paper` (the paper's text) or `authors` (what their released code does instead)."
    )
    methods: tuple[MethodName, ...] = Field(
        tuple(METHODS), min_length=1, description="The methods `compare` runs. Default: all."
    )
    include: Names | None = Field(None, description="Patterns of tensor names to mix. Default: all.")
    exclude: Names | None = Field(
        None, description="Patterns of tensor names not to mix; they are copied from the donor."
    )
    donor: Donor = Field(
        0, description="Ingredient that gives what is not mixed: its name, or its number counted from 0."
    )

    parametrisation: Literal["hyperplane", "simplex"] | None = Field(
        None, description="Free offsets around the mean, or a softmax."
    )
    granularity: Granularity | None = Field(
        None,
        description="One coefficient per model, block, module or tensor; or `{python: module:function}` "
        "from tensor name to group.",
    )
    block_size: BlockSize = Field(
        None,
        description="Models loaded at a time (the paper's b). `auto`: at most 18; `fit`: as many as memory allows; "
        "null: all.",
    )
    passes: int | None = Field(None, description="Times every model is visited.")
    blocks: int | None = Field(None, description="Blocks visited (the paper's T); overrides `passes`.")
    steps: int | None = Field(None, description="Steps per block (the paper's J). null: use `epochs`.")
    epochs: float | None = Field(None, description="Steps per block as epochs of the fitting data.")
    batch_size: int | None = Field(None, description="Samples per step.")
    accumulate: int | None = Field(None, description="Micro-batches a batch is cut into, to save memory.")
    optimizer: Literal["adamw", "sgd"] | None = Field(None, description="Optimiser of the coefficients.")
    momentum: float | None = Field(None, description="Momentum of sgd.")
    lr: float | None = Field(None, description="Learning rate of the coefficients.")
    schedule: Literal["cosine", "constant"] | None = Field(
        None, description="Learning-rate schedule per block."
    )
    warmup: float | None = Field(None, description="Share of a block's steps with linear warm-up.")
    weight_decay: float | None = Field(None, description="Weight decay of the coefficients.")
    clip: float | None = Field(
        None, description="Largest norm of the coefficients' gradient. null: no limit."
    )
    label_smoothing: float | None = Field(None, description="Label smoothing while learning.")
    temperature: bool | None = Field(None, description="Also learn a factor on the logits.")
    decentralise: bool | None = Field(None, description="Directions from the mean (the paper's appendix D).")
    centre: Literal["mean", "soup"] | None = Field(
        None, description="Mean of all models, or the current soup."
    )
    unit_norm: bool | None = Field(None, description="Scale each direction to norm one per group.")
    reset: bool | None = Field(None, description="Coefficients start at zero on every visit.")
    start: StartName | None = Field(
        None,
        description="The soup that learning sets out from: the `mean` of all models, the `greedy` one of all fitting"
        " data, or a fold's `own-greedy` one, chosen without what it leaves out.",
    )
    folds: int | None = Field(None, description="More than 1: learn once per fold, stop early, average.")
    evaluations: int | None = Field(None, description="Held-out evaluations per block when folds > 1.")
    retreat: bool | None = Field(
        None,
        description="Where held-out loss does not fall, go back to the best coefficients at half the rate. "
        "Needs folds.",
    )
    advance: float | None = Field(
        None, description="With retreat: factor on the rate where held-out loss does fall."
    )
    smooth: bool | None = Field(
        None,
        description="Judge, keep and go back to the mean of what the steps since the last held-out evaluation had:"
        " coefficients (with a softmax their logits) and temperature. Needs folds.",
    )
    guard: bool | None = Field(
        None,
        description="Fall back to best, uniform or greedy where held-out data prefers them beyond chance.",
    )
    directions: Literal["auto", "fp64", "fp32", "bf16", "int8"] | None = Field(
        None, description="How loaded models are kept while learning; the result is always exact."
    )
    memory: Bytes | None = Field(
        None, description="What learning may take of the device, such as 8GiB. null: what is free."
    )
    low_memory: bool | None = Field(
        None, description="Free gradients one by one and recompute activations: slower, least memory."
    )
    compile: bool | None = Field(None, description="torch.compile the model while learning.")
    graphs: bool | None = Field(None, description="Capture the step as a CUDA graph where possible.")
    greedy_ties: bool | None = Field(None, description="Greedy adds a model that leaves the score equal.")
    seed: int | None = Field(None, ge=0, description="Order of data and models. Default: `output.seed`.")

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        try:
            self.settings()
            for name in self.methods:
                self.settings(name)
        except MethodError as error:
            raise ValueError(str(error)) from error
        return self

    def given(self) -> dict[str, Any]:
        """The settings the recipe states; null counts as stated."""
        stated = {name: getattr(self, name) for name in SETTINGS if name in self.model_fields_set}
        if stated.get("epochs") is not None and "steps" not in stated:
            stated["steps"] = None
        return stated

    def settings(self, method: str | None = None, **extra: Any) -> Settings:
        """Settings of the recipe's method, or of another one beside it in a comparison."""
        name = self.name if method is None else method
        stated = self.given()
        preset = self.preset
        if name != self.name:
            stated = {key: value for key, value in stated.items() if key not in _SWITCHES}
            if name not in _BLOCKWISE:
                stated.pop("block_size", None)
            if METHODS[name].get("parametrisation") == "simplex":
                stated = {key: value for key, value in stated.items() if key not in _HYPERPLANE_ONLY}
                preset = None if preset == "authors" else preset
        if isinstance(stated.get("granularity"), PythonCode):
            stated["granularity"] = extra.pop("granularity", str)
        else:
            extra.pop("granularity", None)
        return settings_for(name, preset, **{**extra, **stated})

    def resolved(self) -> dict[str, Any]:
        """Everything stated, and every default that does not depend on the method."""
        stated = self.given()
        common = {f.name: f.default for f in dataclasses.fields(Settings) if f.name not in _VARIABLE}
        whole = self.model_dump(mode="json", exclude=set(SETTINGS) - set(stated))
        return {**whole, **{k: v for k, v in common.items() if k not in stated}, **_plain(stated)}


def _plain(stated: dict[str, Any]) -> dict[str, Any]:
    return {k: v.model_dump() if isinstance(v, PythonCode) else v for k, v in stated.items()}
